-- Versions that need others and versions that expire, the history of aliases, and what runners say of themselves.

alter table resource_version
    add column ttl_ms bigint check (ttl_ms between 60000 and 315576000000),
    add column expires_at timestamptz,
    add constraint resource_version_expires_with_ttl check ((ttl_ms is null) = (expires_at is null));
create index resource_version_by_expiry on resource_version (expires_at, resource_id, version)
    where expires_at is not null;

-- A version cannot be removed while another one needs it: the foreign key says so, whoever is faster.
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

-- Which rollouts use a version that has a ttl; written in the commit that creates the rollout, removed some time after
-- the rollout has ended. See docs/decisions/0007.
create table resource_use (
    resource_id int not null,
    version bigint not null,
    rollout_id uuid not null,
    primary key (resource_id, version, rollout_id),
    constraint resource_use_is_kept foreign key (resource_id, version) references resource_version
);

-- Every place that an alias had; a trigger writes it, so that moves by the last release are known too.
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
insert into resource_alias_move (resource_id, alias, revision, version, xid, moved_at)
select a.resource_id, a.alias, a.revision, a.version, a.xid, a.updated_at from resource_alias a;

create function note_alias_move() returns trigger language plpgsql as $$
begin
    insert into resource_alias_move (resource_id, alias, revision, version, moved_at)
    values (new.resource_id, new.alias, new.revision, new.version, new.updated_at);
    return null;
end
$$;
create trigger resource_alias_moved after insert or update on resource_alias
    for each row execute function note_alias_move();

-- load: the RunnerLoad that the runner sent last. The counts are of its ended attempts.
alter table runner_session
    add column load bytea,
    add column ended_count bigint not null default 0,
    add column failed_count bigint not null default 0;
create index runner_session_alive on runner_session (id) where ended_at is null;
