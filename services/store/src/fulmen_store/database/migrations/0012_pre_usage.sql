-- What model calls used, and what the proxy's processes tell one another about limits.

-- model_limits: a serialized fulmen.store.v1.ModelLimits; null: no limits.
alter table project add column model_limits bytea;

-- The sums of all calls by the minute in which they were told.
create table usage_minute (
    project_id int not null,
    minute timestamptz not null,
    model text not null,
    backend text not null,
    request_count bigint not null,
    failure_count bigint not null,
    prompt_token_count bigint not null,
    cached_token_count bigint not null,
    completion_token_count bigint not null,
    cost_micros bigint not null,
    primary key (project_id, minute, model, backend)
) with (fillfactor = 50);

-- The sums of attempts. run_id: that of the rollout.
create table usage_attempt (
    rollout_id uuid not null,
    attempt int not null,
    model text not null,
    backend text not null,
    project_id int not null,
    run_id int,
    request_count bigint not null,
    failure_count bigint not null,
    prompt_token_count bigint not null,
    cached_token_count bigint not null,
    completion_token_count bigint not null,
    cost_micros bigint not null,
    primary key (rollout_id, attempt, model, backend)
) with (fillfactor = 70);
create index usage_attempt_by_project on usage_attempt (project_id, rollout_id);
create index usage_attempt_by_run on usage_attempt (project_id, run_id, rollout_id) where run_id is not null;

-- The proxy's processes, and how far each one's usage was counted.
create table usage_instance (
    id text primary key,
    sequence bigint not null,
    seen_at timestamptz not null default now()
) with (fillfactor = 50);

-- What each process says of its limits: a serialized fulmen.store.v1.ExchangeUsageRequest with windows only, and their
-- newest slot. Worthless after a minute, so it is not logged.
create unlogged table usage_window (
    instance text primary key,
    project text not null,
    slot bigint not null,
    windows bytea not null,
    seen_at timestamptz not null default now()
) with (fillfactor = 50);
