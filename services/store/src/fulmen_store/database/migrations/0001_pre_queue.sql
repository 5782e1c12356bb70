-- The queue. Principles:
-- * one narrow mutable table, `item`, with one row per live rollout; no row changes an indexed column except the lease's
--   session (docs/decisions/0006);
-- * everything else is insert-only and partitioned by the time inside the rollout's UUIDv7;
-- * CHECK constraints hold the invariants that no program may break.
-- Numbers of enums are those of fulmen.store.v1.

create table project (
    id int generated always as identity primary key,
    name text not null unique check (name ~ '^projects/[a-z0-9-]{1,63}$'),
    weight real not null default 100 check (weight > 0),
    -- A null quota is no limit.
    max_running int check (max_running between 1 and 1000000),
    max_queued int check (max_queued between 1 and 100000000),
    -- How long final rollouts and their spans are kept; null: forever.
    retention interval,
    -- Serialized fulmen.store.v1.QueueRules; null: the defaults.
    rules bytea,
    -- Serialized fulmen.store.v1.ModelLimits; null: no limits.
    model_limits bytea,
    revision bigint not null default 1,
    created_at timestamptz not null default now()
);
insert into project (name) values ('projects/default');

create table training_run (
    id int generated always as identity primary key,
    project_id int not null references project,
    name text not null,
    unique (project_id, name)
);

-- Which algorithm service runs which training run. An owner keeps its row until another one replaces it, also after it has
-- released it. A lease is held while it is neither released nor expired.
create table run_lease (
    project_id int not null references project,
    name text not null check (name ~ '^projects/[a-z0-9-]{1,63}/trainingRuns/[A-Za-z0-9._-]{1,128}$'),
    policy text not null check (length(policy) <= 63),
    -- 1: idle (paused or ended), 2: waiting for a run slot, 3: running.
    state smallint not null check (state between 1 and 3),
    owner text not null,
    owner_address text not null,
    epoch bigint not null check (epoch >= 0),
    released boolean not null,
    -- Whether the owner runs the run; if not, it only changes it.
    claims_policy boolean not null default true,
    expires_at timestamptz not null,
    -- Whether its waiting rollouts were cancelled because nothing ran it.
    swept boolean not null default false,
    record bytea not null check (length(record) <= 1048576),
    request_id text not null,
    -- Which storage holds the run's files: a service with another one cannot run it.
    storage text not null check (length(storage) <= 64),
    updated_at timestamptz not null default now(),
    primary key (project_id, name),
    constraint run_lease_has_owner check (released or owner <> '')
);
create unique index run_lease_by_request on run_lease (project_id, request_id) where request_id <> '';
-- Two runs that train the same policy are never run at once.
create unique index run_lease_by_policy on run_lease (project_id, policy)
    where policy <> '' and not released and claims_policy;
create index run_lease_by_update on run_lease (updated_at);
create index run_lease_by_expiry on run_lease (expires_at) where state <> 1;

-- Names that many rollouts share: task types (kind 1) and agent versions (kind 2).
create table interned_name (
    id int generated always as identity primary key,
    project_id int not null references project,
    kind smallint not null check (kind in (1, 2)),
    name text not null,
    unique (project_id, kind, name)
);

-- Agent versions under which runners died, with the latest rollouts that ended as RUNNER_LOST, each within a day of the one
-- before. Older rows are removed, unless they pause the version.
create table lost_runner (
    agent int primary key references interned_name,
    project_id int not null references project,
    rollouts uuid[] not null check (cardinality(rollouts) >= 1),
    lost_at timestamptz not null default now(),
    paused_at timestamptz
);
create index lost_runner_paused on lost_runner (project_id) where paused_at is not null;

-- Durations of successful attempts: counts by task type and logarithmic bucket (scheduling/duration_sketch.py).
create table task_duration (
    task_type int not null references interned_name,
    bucket smallint not null,
    count bigint not null check (count > 0),
    primary key (task_type, bucket)
) with (fillfactor = 70);

-- A group is announced when `size` members have ended; further members are refused.
create table rollout_group (
    group_key uuid primary key,
    project_id int not null,
    size smallint not null check (size between 1 and 4096),
    created smallint not null,
    touched_at timestamptz not null default now(),
    constraint rollout_group_not_overfull check (created between 1 and size)
);
create index rollout_group_by_age on rollout_group using brin (touched_at) with (autosummarize = on);

-- What was asked for; never updated. `request` is the serialized fulmen.store.v1.Rollout; the other columns are for lists.
create table rollout (
    id uuid not null,
    project_id int not null,
    run_id int,
    sort_priority smallint not null check (sort_priority between -100 and 100),
    mode smallint not null check (mode between 1 and 3),
    group_id text,
    task_type int,
    agent int,
    request bytea not null,
    created_at timestamptz not null default now(),
    primary key (id)
) partition by range (id);
create index rollout_by_project on rollout (project_id, id);
create index rollout_by_run on rollout (project_id, run_id, id);

-- One row per rollout that is not final. session is null: it waits; otherwise that runner session holds the lease.
create table item (
    id uuid primary key,
    project_id int not null,
    run_id int,
    -- The negated priority: lower values go first.
    sort_priority smallint not null,
    group_key uuid,
    group_size smallint not null check (group_size between 1 and 4096),
    labels text[],
    task_type int,
    agent int,
    max_attempts smallint not null check (max_attempts between 1 and 100),
    retry_mask int not null,
    backoff_ms int not null check (backoff_ms between 0 and 60000),
    timeout_ms int not null check (timeout_ms between 1 and 86400000),
    deadline timestamptz,
    hedged boolean not null default false,
    run_at timestamptz not null,
    charged smallint not null default 0 check (charged >= 0),
    -- Runners that died while they ran it.
    runner_losses smallint not null default 0 check (runner_losses >= 0),
    epoch int not null default 0 check (epoch >= 0),
    session uuid,
    leased_at timestamptz,
    cancel_requested boolean not null default false,
    -- When a cancelled attempt ends although its runner did not report.
    cancel_by timestamptz,
    -- The second lease of a hedged rollout. When one of the two ends, the other becomes the ordinary lease; hedge_epoch
    -- keeps its value, so that no epoch is granted twice: the next one is above both.
    hedge_session uuid,
    hedge_epoch int check (hedge_epoch > 0),
    hedge_leased_at timestamptz,
    constraint item_group_is_named check (group_key is not null or group_size = 1),
    constraint item_lease_is_whole check ((session is null) = (leased_at is null)),
    constraint item_budget check (charged <= max_attempts),
    constraint item_cancel_only_while_running check (not cancel_requested or session is not null),
    constraint item_hedge_is_whole check (
        (hedge_session is null) = (hedge_leased_at is null) and (hedge_session is null or hedge_epoch is not null)
    ),
    constraint item_hedge_only_while_running check (hedge_session is null or session is not null)
) with (
    fillfactor = 70, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 0
);
create index item_in_order on item (project_id, sort_priority, id);
-- Leases are found by session and searched for overdue ones through this index, never through the backlog.
create index item_leased on item (session) include (project_id) where session is not null;
create index item_by_deadline on item (deadline) where deadline is not null;
create index item_hedged on item (hedge_session) where hedge_session is not null;
create index item_hedgeable on item (project_id) where hedged and session is not null;

-- One row per ended attempt; never updated.
create table attempt (
    rollout_id uuid not null,
    number int not null check (number >= 1),
    state smallint not null check (state in (2, 3)),
    failure_kind smallint not null check (failure_kind between 0 and 9),
    rollout_state smallint not null,
    session uuid not null,
    started_at timestamptz not null,
    ended_at timestamptz not null default now(),
    report bytea not null,
    primary key (rollout_id, number),
    constraint attempt_failure_is_named check ((state = 2) = (failure_kind = 0)),
    -- (attempt state, failure kind, next state of the rollout): ATTEMPT_ENDS in rollouts/transitions.py.
    constraint attempt_end_is_legal check (
        (rollout_state = 4 and (state = 2 or failure_kind = 8))
        or (rollout_state = 5 and state = 3 and failure_kind in (1, 2, 3, 4, 5, 9))
        or (rollout_state in (2, 3) and state = 3 and failure_kind in (1, 2, 3, 4, 5, 7))
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
    failure_kind smallint not null check (failure_kind between 0 and 9),
    -- Of the attempt that decided the state; null without one.
    reward float8 check (reward > '-infinity' and reward < 'infinity'),
    duration_s float8,
    -- 200 characters of up to four bytes; a database without an encoding counts bytes as characters.
    failure_message text check (octet_length(failure_message) between 1 and 800),
    xid xid8 not null default pg_current_xact_id(),
    ended_at timestamptz not null default now(),
    primary key (rollout_id),
    constraint rollout_end_failure_is_named check (
        (state = 4 and failure_kind = 0) or (state = 5 and failure_kind in (1, 2, 3, 4, 5, 9)) or (state = 6 and failure_kind = 6)
    )
) partition by range (rollout_id);
create index rollout_end_feed on rollout_end (project_id, xid, rollout_id);
create index rollout_end_group on rollout_end (group_key, xid, rollout_id) where group_key is not null;
create index rollout_end_dead on rollout_end (project_id, rollout_id) where state = 5;

-- Dead rollouts that were run again: a second run by filter finds its key taken. Insert-only.
create table rollout_retry (
    rollout_id uuid primary key,
    retried_as uuid not null,
    retried_at timestamptz not null default now()
);

create table span_chunk (
    rollout_id uuid not null,
    attempt int not null,
    chunk_id uuid not null,
    span_count int not null check (span_count between 1 and 4096),
    codec smallint not null check (codec in (1, 2)),
    start_ns bigint not null,
    end_ns bigint not null,
    payload bytea not null,
    -- SHA-256 of a payload in the blob storage; `payload` is empty then.
    blob bytea,
    blob_size int,
    primary key (rollout_id, attempt, chunk_id),
    constraint span_chunk_blob_is_whole check (
        (blob is null and blob_size is null)
        or (length(blob) = 32 and blob_size > 0 and length(payload) = 0)
    )
) partition by range (rollout_id);
alter table span_chunk alter column payload set storage external;

-- Sessions of runners; ids are never reused.
create table runner_session (
    id uuid primary key,
    subject text not null,
    -- The project of the runner's token, or `projects/*`; tokens of other projects do not reach the session.
    project text not null,
    host text not null,
    info bytea not null,
    -- Serialized fulmen.store.v1.RunnerLoad, as last reported.
    load bytea,
    ended_count bigint not null default 0,
    failed_count bigint not null default 0,
    opened_at timestamptz not null default now(),
    lease_until timestamptz not null,
    ended_at timestamptz,
    -- Leases that it held when it expired; null: it has not, or was ended by its runner.
    lost_leases int check (lost_leases >= 0)
) with (fillfactor = 50);
create index runner_session_alive on runner_session (id) where ended_at is null;

-- Live replicas of the store, which share the backlog and notify one another. A hint: no invariant depends on it.
create table replica (
    id uuid primary key,
    address text not null check (length(address) between 1 and 260),
    runner_count int not null check (runner_count >= 0),
    started_at timestamptz not null default now(),
    lease_until timestamptz not null
) with (fillfactor = 50);

-- First results of mutating requests, kept for 24 hours.
create table request_log (
    project_id int not null,
    method text not null,
    request_id text not null check (length(request_id) between 1 and 128),
    result bytea not null,
    created_at timestamptz not null default now(),
    primary key (project_id, method, request_id)
);
create index request_log_by_age on request_log (created_at);

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

-- Days that have partitions of a table.
create function partition_days(parent text) returns setof date language sql stable as $$
    select to_date(right(c.relname, 8), 'YYYYMMDD')
    from pg_inherits i join pg_class c on c.oid = i.inhrelid
    where i.inhparent = to_regclass(parent) and c.relname ~ ('^' || parent || '_[0-9]{8}$')
$$;

-- Whether the rollouts of a day have expired: none is live, and each project that has some is past its retention, counted
-- from the end of its last one. A minute is added, because rows are read in order of transaction ids.
create function day_is_expired(day date) returns boolean language plpgsql stable as $$
declare
    low constant uuid := uuid7_bound(day::timestamp at time zone 'UTC');
    high constant uuid := uuid7_bound((day + 1)::timestamp at time zone 'UTC');
    p record;
    newest timestamptz;
begin
    if exists (select 1 from item i where i.id >= low and i.id < high) then
        return false;
    end if;
    for p in select q.id, q.retention from project q order by q.retention desc nulls first loop
        if exists (select 1 from rollout r where r.project_id = p.id and r.id >= low and r.id < high) then
            if p.retention is null or (day + 1)::timestamp at time zone 'UTC' + p.retention > now() then
                return false;
            end if;
            select e.ended_at into newest from rollout_end e
            where e.project_id = p.id and e.rollout_id >= low and e.rollout_id < high
            order by e.xid desc limit 1;
            if newest + p.retention + interval '1 minute' > now() then
                return false;
            end if;
        end if;
    end loop;
    return true;
end
$$;

-- Drops the partition of one day of one table if the day has expired; returns whether it did. `rollout` goes first:
-- everything else is reached through it. The table is locked, so that nothing can be added to the day meanwhile; the lock
-- is waited for at most one second.
create function drop_expired_partition(parent text, day date) returns boolean language plpgsql as $$
declare
    partition constant text := parent || '_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(format('%I', partition)) is null then
        return false;
    end if;
    perform set_config('lock_timeout', '1s', true);
    begin
        execute format('lock table only %I in access exclusive mode', parent);
        execute format('lock table %I in access exclusive mode', partition);
    exception when lock_not_available then
        return false;
    end;
    if not day_is_expired(day) then
        return false;
    end if;
    execute format('drop table %I', partition);
    return true;
end
$$;
