-- Rollouts that are created at the times of cron expressions. Enumerations are those of fulmen.store.v1.
create table schedule (
    id bigint generated always as identity primary key,
    project_id int not null references project,
    name text not null,
    -- A fulmen.store.v1.Schedule as requested, with defaults.
    spec bytea not null,
    cron text not null,
    time_zone text not null,
    overlap_policy smallint not null,
    missed_policy smallint not null,
    rollout_count int not null,
    created_at timestamptz not null default now(),
    paused_at timestamptz,
    pause_reason text not null default '' check (length(pause_reason) <= 256),
    -- Null while it is paused.
    next_due timestamptz,
    unique (project_id, name)
);
create index schedule_due on schedule (next_due) where next_due is not null;

-- A row is there before the first rollout of its due time: whoever continues it uses the same ids.
create table schedule_run (
    schedule_id bigint not null references schedule on delete cascade,
    due_at timestamptz not null,
    claimed_at timestamptz not null default now(),
    state smallint not null,
    rollout_ids uuid[] not null default '{}',
    -- When another replica may continue it, while it is starting.
    retry_at timestamptz,
    failure_reason text not null default '',
    failure_message text not null default '',
    primary key (schedule_id, due_at)
);
create index schedule_run_starting on schedule_run (retry_at) where state = 1;

-- What the durations of its task type bound the attempt of this epoch to, if the rollout asks for it.
alter table item add column bound_ms int;
alter table item add column bound_epoch int;
