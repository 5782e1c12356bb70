-- Versioned resources, issued tokens and the usage of model calls.

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
    ttl_ms bigint check (ttl_ms between 60000 and 315576000000),
    expires_at timestamptz,
    xid xid8 not null default pg_current_xact_id(),
    created_at timestamptz not null default now(),
    primary key (resource_id, version),
    constraint resource_version_expires_with_ttl check ((ttl_ms is null) = (expires_at is null))
);
alter table resource_version alter column content set storage external;
create index resource_version_feed on resource_version (xid);
create index resource_version_by_expiry on resource_version (expires_at, resource_id, version)
    where expires_at is not null;

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

-- A version cannot be removed while another one needs it: the foreign key decides races.
create table resource_dependency (
    resource_id int not null,
    version bigint not null,
    position smallint not null check (position between 0 and 31),
    needs_resource_id int not null,
    needs_version bigint not null,
    primary key (resource_id, version, position),
    foreign key (resource_id, version) references resource_version on delete cascade,
    constraint resource_dependency_is_kept foreign key (needs_resource_id, needs_version) references resource_version
);
create index resource_dependency_needed on resource_dependency (needs_resource_id, needs_version);

-- The dependencies of a version as names, in the order in which they were given.
create function resource_dependencies(of_resource int, of_version bigint) returns text[] language sql stable as $$
    select array(
        select format('resources/%s/versions/%s', n.name, d.needs_version)
        from resource_dependency d join resource n on n.id = d.needs_resource_id
        where d.resource_id = of_resource and d.version = of_version
        order by d.position
    )
$$;

-- Uses of versions with a ttl by rollouts: written in the commit that creates the rollout, removed some time after its
-- end. See docs/decisions/0007.
create table resource_use (
    resource_id int not null,
    version bigint not null,
    rollout_id uuid not null,
    primary key (resource_id, version, rollout_id),
    constraint resource_use_is_kept foreign key (resource_id, version) references resource_version
);

-- The history of aliases, written by a trigger.
create table resource_alias_move (
    resource_id int not null,
    alias text not null,
    revision bigint not null,
    version bigint not null,
    xid xid8 not null default pg_current_xact_id(),
    moved_at timestamptz not null,
    primary key (resource_id, alias, revision),
    foreign key (resource_id, version) references resource_version on delete cascade
);
create index resource_alias_move_feed on resource_alias_move (xid);
create index resource_alias_move_by_version on resource_alias_move (resource_id, version);

create function note_alias_move() returns trigger language plpgsql as $$
begin
    insert into resource_alias_move (resource_id, alias, revision, version, moved_at)
    values (new.resource_id, new.alias, new.revision, new.version, new.updated_at);
    return null;
end
$$;
create trigger resource_alias_moved after insert or update on resource_alias
    for each row execute function note_alias_move();

-- Issued tokens, without the tokens themselves. The project is a name, or `projects/*`.
create table issued_token (
    id text primary key check (length(id) = 22),
    project text not null,
    role smallint not null check (role between 1 and 5),
    subject text not null check (length(subject) between 1 and 128),
    created_at timestamptz not null default now(),
    expires_at timestamptz not null check (expires_at > created_at),
    revoked_at timestamptz
);
create index issued_token_newest on issued_token (created_at, id);
create index issued_token_of_project on issued_token (project, created_at, id);
create index issued_token_by_expiry on issued_token (expires_at);
create index issued_token_revoked on issued_token (expires_at) where revoked_at is not null;

-- Sums of all calls by the minute in which they were reported.
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

-- Sums by attempt.
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

-- Proxy processes and the sequence up to which their usage was counted.
create table usage_instance (
    id text primary key,
    sequence bigint not null,
    seen_at timestamptz not null default now()
) with (fillfactor = 50);

-- Rate-limit windows of proxy processes: a serialized fulmen.store.v1.SyncUsageRequest with windows only, and their newest
-- slot. Worthless after a minute, therefore unlogged.
create unlogged table usage_window (
    instance text primary key,
    project text not null,
    slot bigint not null,
    windows bytea not null,
    seen_at timestamptz not null default now()
) with (fillfactor = 50);

-- Secrets of projects. `sealed` is encrypted with a key derived from a signing key, whose id is `key_id`, and bound to
-- the names of project and secret and to the hosts.
create table secret (
    project_id int not null,
    name text not null check (length(name) between 1 and 64),
    -- Of a backend's key: where it may be sent. Empty for a variable of agents.
    hosts text[] not null check (cardinality(hosts) <= 16),
    key_id bytea not null check (length(key_id) = 8),
    sealed bytea not null check (length(sealed) <= 65600),
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    primary key (project_id, name)
);
