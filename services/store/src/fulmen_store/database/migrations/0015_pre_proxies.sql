-- The processes of the LLM proxy. scope is the project of its token, or projects/*.
create table proxy (
    id text not null check (length(id) between 1 and 64),
    scope text not null,
    -- Whether it answers attempts without an open account while the store is unavailable.
    serves_alone boolean not null,
    contact_at timestamptz not null,
    left_at timestamptz,
    primary key (id, scope)
) with (fillfactor = 50);
create index proxy_by_contact on proxy (contact_at);

-- What a process knows of the calls of an attempt: open while it may hold captures that the store does not have.
create table capture_account (
    rollout_id uuid not null,
    attempt int not null,
    project_id int not null,
    proxy text not null,
    scope text not null,
    is_open boolean not null,
    call_count bigint not null,
    infra_failure_count bigint not null,
    unusable_count bigint not null,
    prompt_token_count bigint not null,
    completion_token_count bigint not null,
    throttled_count bigint not null,
    changed_at timestamptz not null default now(),
    primary key (rollout_id, attempt, project_id, proxy, scope)
) with (fillfactor = 70, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0);
