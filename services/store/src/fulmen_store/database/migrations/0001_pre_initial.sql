-- The system of record. Principles:
-- * one narrow mutable table, `item` (one row per live rollout); none of its indexed columns ever changes, so claims,
--   retries and cancel marks are heap-only (HOT) updates;
-- * everything else is insert-only, partitioned by the time inside the rollout's UUIDv7;
-- * CHECK constraints hold the invariants that no program may break.
-- Numbers of enums are those of fulmen.store.v1.

create table project (
    id int generated always as identity primary key,
    name text not null unique check (name ~ '^projects/[a-z0-9-]{1,63}$'),
    weight real not null default 100 check (weight > 0)
);
insert into project (name) values ('projects/default');

create table training_run (
    id int generated always as identity primary key,
    project_id int not null references project,
    name text not null,
    unique (project_id, name)
);

-- A group is announced when `size` members have ended; more than `size` are refused.
create table rollout_group (
    group_key uuid primary key,
    size smallint not null check (size between 1 and 4096),
    created smallint not null,
    constraint rollout_group_not_overfull check (created between 1 and size)
);

-- What was asked for; never updated.
create table rollout (
    id uuid not null,
    project_id int not null,
    run_id int,
    group_key uuid,
    group_size smallint not null default 1 check (group_size between 1 and 4096),
    sort_priority smallint not null check (sort_priority between -100 and 100),
    run_at timestamptz not null default now(),
    max_attempts smallint not null check (max_attempts between 1 and 100),
    retry_mask int not null,
    backoff_ms int not null check (backoff_ms between 0 and 60000),
    labels text[],
    request bytea not null,
    created_at timestamptz not null default now(),
    primary key (id),
    constraint rollout_group_is_named check (group_key is not null or group_size = 1)
) partition by range (id);
create index rollout_by_run on rollout (project_id, run_id, id);

-- One row per rollout that is not final. session is null: it waits; otherwise that runner session holds the lease.
-- `sort_priority` is the negated priority: the lower, the earlier.
create table item (
    id uuid primary key,
    project_id int not null,
    sort_priority smallint not null,
    run_id int,
    group_key uuid,
    group_size smallint not null,
    max_attempts smallint not null,
    retry_mask int not null,
    backoff_ms int not null,
    labels text[],
    epoch int not null default 0 check (epoch >= 0),
    charged smallint not null default 0 check (charged >= 0),
    session uuid,
    leased_at timestamptz,
    run_at timestamptz not null,
    cancel_requested boolean not null default false,
    constraint item_lease_is_whole check ((session is null) = (leased_at is null)),
    constraint item_budget check (charged <= max_attempts),
    constraint item_cancel_only_while_running check (not cancel_requested or session is not null)
) with (
    fillfactor = 70, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 0
);
create index item_in_order on item (project_id, sort_priority, id);

-- One row per ended attempt; never updated.
create table attempt (
    rollout_id uuid not null,
    number int not null check (number >= 1),
    state smallint not null check (state in (2, 3)),
    failure_kind smallint not null check (failure_kind between 0 and 7),
    rollout_state smallint not null,
    session uuid not null,
    started_at timestamptz not null,
    ended_at timestamptz not null default now(),
    report bytea not null,
    primary key (rollout_id, number),
    constraint attempt_failure_is_named check ((state = 2) = (failure_kind = 0)),
    -- (attempt state, failure kind, next state of the rollout): fulmen_store.rollouts.transitions.ATTEMPT_ENDS.
    constraint attempt_end_is_legal check (
        (rollout_state = 4 and state = 2)
        or (rollout_state = 5 and state = 3 and failure_kind between 1 and 5)
        or (rollout_state = 3 and state = 3 and failure_kind in (1, 2, 3, 4, 5, 7))
        or (rollout_state = 6)
    )
) partition by range (rollout_id);

-- One row per final rollout; never updated. Its key makes "final exactly once" a property of the database.
create table rollout_end (
    rollout_id uuid not null,
    project_id int not null,
    run_id int,
    group_key uuid,
    group_size smallint not null,
    state smallint not null check (state in (4, 5, 6)),
    failure_kind smallint not null check (failure_kind between 0 and 7),
    xid xid8 not null default pg_current_xact_id(),
    ended_at timestamptz not null default now(),
    primary key (rollout_id),
    constraint rollout_end_failure_is_named check (
        (state = 4 and failure_kind = 0) or (state = 5 and failure_kind between 1 and 5) or (state = 6 and failure_kind = 6)
    )
) partition by range (rollout_id);
create index rollout_end_feed on rollout_end (project_id, xid, rollout_id);
create index rollout_end_group on rollout_end (group_key, xid, rollout_id) where group_key is not null;

create table span_chunk (
    rollout_id uuid not null,
    attempt int not null,
    chunk_id uuid not null,
    span_count int not null check (span_count between 1 and 4096),
    codec smallint not null check (codec in (1, 2)),
    start_ns bigint not null,
    end_ns bigint not null,
    payload bytea not null,
    primary key (rollout_id, attempt, chunk_id)
) partition by range (rollout_id);
alter table span_chunk alter column payload set storage external;

-- A runner's session; its id is minted once and never used again.
create table runner_session (
    id uuid primary key,
    subject text not null,
    host text not null,
    info bytea not null,
    lease_until timestamptz not null,
    opened_at timestamptz not null default now(),
    ended_at timestamptz
) with (fillfactor = 50);

-- The first result of a mutating request, kept for 24 hours.
create table request_log (
    project_id int not null,
    method text not null,
    request_id text not null check (length(request_id) between 1 and 128),
    result bytea not null,
    created_at timestamptz not null default now(),
    primary key (project_id, method, request_id)
);
create index request_log_by_age on request_log (created_at);

create table resource (
    id int generated always as identity primary key,
    project_id int not null references project,
    name text not null check (name ~ '^[a-z0-9._-]{1,128}$'),
    kind text not null check (kind ~ '^[a-z0-9_-]{1,32}$'),
    last_version bigint not null default 0,
    unique (project_id, name)
);

create table resource_version (
    resource_id int not null references resource,
    version bigint not null check (version >= 1),
    content_type text not null,
    content bytea not null,
    sha256 bytea not null check (length(sha256) = 32),
    parent text not null,
    metadata bytea not null,
    xid xid8 not null default pg_current_xact_id(),
    created_at timestamptz not null default now(),
    primary key (resource_id, version)
);
alter table resource_version alter column content set storage external;
create index resource_version_feed on resource_version (xid);

create table resource_alias (
    resource_id int not null references resource,
    alias text not null check (alias ~ '^[a-z0-9._-]{1,64}$'),
    version bigint not null,
    revision bigint not null default 1,
    xid xid8 not null default pg_current_xact_id(),
    updated_at timestamptz not null default now(),
    primary key (resource_id, alias),
    foreign key (resource_id, version) references resource_version
);
create index resource_alias_feed on resource_alias (xid);

-- The lower bound of the UUIDv7s of a moment.
create function uuid7_bound(moment timestamptz) returns uuid language sql immutable strict parallel safe as $$
    select (lpad(to_hex((extract(epoch from moment) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
$$;

-- Creates the partition of one day for every partitioned table; does nothing for those that exist.
create procedure create_day_partitions(day date) language plpgsql as $$
declare
    parent text;
begin
    foreach parent in array array['rollout', 'attempt', 'rollout_end', 'span_chunk'] loop
        if to_regclass(format('%I', parent || '_' || to_char(day, 'YYYYMMDD'))) is null then
            begin
                execute format(
                    'create table %I partition of %I for values from (%L) to (%L)',
                    parent || '_' || to_char(day, 'YYYYMMDD'), parent,
                    uuid7_bound(day::timestamp at time zone 'UTC'),
                    uuid7_bound((day + 1)::timestamp at time zone 'UTC')
                );
            exception when check_violation or duplicate_table then
                -- Rows of that day are in the default partition already (they stay there), or another replica was first.
                null;
            end;
        end if;
    end loop;
end
$$;

create table rollout_default partition of rollout default;
create table attempt_default partition of attempt default;
create table rollout_end_default partition of rollout_end default;
create table span_chunk_default partition of span_chunk default;
