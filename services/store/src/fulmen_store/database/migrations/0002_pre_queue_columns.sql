-- What the queue's rules, its filters and its timers look at. Columns only; the first release writes rows without them.

-- Names that many rollouts share are stored once: task types (kind 1) and agent versions (kind 2).
create table interned_name (
    id int generated always as identity primary key,
    project_id int not null references project,
    kind smallint not null check (kind in (1, 2)),
    name text not null,
    unique (project_id, kind, name)
);

alter table rollout
    add column mode smallint not null default 1 check (mode between 1 and 3),
    add column group_id text,
    add column task_type int,
    add column agent int,
    add column deadline timestamptz,
    add column timeout_ms int not null default 900000 check (timeout_ms between 1 and 86400000);

-- cancel_by: when a cancelled attempt is ended although its runner did not report.
alter table item
    add column task_type int,
    add column agent int,
    add column deadline timestamptz,
    add column timeout_ms int not null default 900000 check (timeout_ms between 1 and 86400000),
    add column hedged boolean not null default false,
    add column cancel_by timestamptz;

-- Leases are looked up by session and looked through for overdue ones: never through the backlog. A claim is no longer
-- heap-only for it; see docs/decisions/0006.
create index item_leased on item (session) include (project_id) where session is not null;
create index item_by_deadline on item (deadline) where deadline is not null;

-- Failure kind 8: SUPERSEDED.
alter table attempt
    drop constraint attempt_failure_kind_check,
    add constraint attempt_failure_kind_check check (failure_kind between 0 and 8);
