-- Every change locks the names of its resources first, in a fixed order and before the first write: the transaction gets
-- its id while it holds the locks, so that transaction ids grow with version numbers.

-- name: lock_resources
select pg_advisory_xact_lock(x.key)
from (
    select distinct hashtextextended(format('resource/%s/%s', $1::int, n), 0) as key from unnest($2::text[]) n order by 1
) x;

-- name: latest_numbers
select r.name, r.last_version from resource r where r.project_id = $1 and r.name = any ($2::text[]);

-- name: keep_versions
select r.name, v.resource_id, v.version
from unnest($2::text[], $3::bigint[]) as x (name, version)
cross join lateral (select q.id, q.name from resource q where q.project_id = $1 and q.name = x.name limit 1) r
cross join lateral (
    select q.resource_id, q.version from resource_version q
    where q.resource_id = r.id and q.version = x.version limit 1 for key share
) v;

-- name: next_version
insert into resource (project_id, name, kind, last_version) values ($1, $2, $3, 1)
on conflict (project_id, name) do update set last_version = resource.last_version + 1
returning id, kind, last_version;

-- name: add_version
insert into resource_version (
    resource_id, version, content_type, content, sha256, parent, metadata, ttl_ms, expires_at
)
values ($1, $2, $3, $4, $5, $6, $7, $8::bigint, now() + $8::bigint * interval '1 millisecond')
returning created_at;

-- name: add_dependencies
insert into resource_dependency (resource_id, version, position, needs_resource_id, needs_version)
select $1, $2, x.n - 1, x.needs_resource_id, x.needs_version
from unnest($3::int[], $4::bigint[]) with ordinality as x (needs_resource_id, needs_version, n);

-- name: move_latest
insert into resource_alias (resource_id, alias, version) values ($1, 'latest', $2)
on conflict (resource_id, alias) do update set
    version = excluded.version, revision = resource_alias.revision + 1, xid = excluded.xid, updated_at = now();

-- name: version_by_number
-- With its content if that has at most $4 bytes.
select r.name, r.kind, v.resource_id, v.version, v.content_type,
    case when octet_length(v.content) <= $4::int then v.content else ''::bytea end as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at, v.ttl_ms, v.expires_at,
    resource_dependencies(v.resource_id, v.version) as dependencies
from resource r
join resource_version v on v.resource_id = r.id
where r.project_id = $1 and r.name = $2 and v.version = $3;

-- name: version_by_alias
select r.name, r.kind, v.resource_id, v.version, v.content_type,
    case when octet_length(v.content) <= $4::int then v.content else ''::bytea end as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at, v.ttl_ms, v.expires_at,
    resource_dependencies(v.resource_id, v.version) as dependencies
from resource r
join resource_alias a on a.resource_id = r.id
join resource_version v on v.resource_id = r.id and v.version = a.version
where r.project_id = $1 and r.name = $2 and a.alias = $3;

-- name: content_part
select substring(v.content from $4::int + 1 for $5::int) as content
from resource r
join resource_version v on v.resource_id = r.id
where r.project_id = $1 and r.name = $2 and v.version = $3;

-- name: list_versions
select r.name, r.kind, v.resource_id, v.version, v.content_type, ''::bytea as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at, v.ttl_ms, v.expires_at,
    resource_dependencies(v.resource_id, v.version) as dependencies
from resource r
join resource_version v on v.resource_id = r.id
where r.project_id = $1 and r.name = $2 and ($3::text is null or r.kind = $3) and v.version < $4
order by v.version desc
limit $5;

-- name: list_latest
select r.name, r.kind, v.resource_id, v.version, v.content_type, ''::bytea as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at, v.ttl_ms, v.expires_at,
    resource_dependencies(v.resource_id, v.version) as dependencies
from resource r
join resource_version v on v.resource_id = r.id and v.version = r.last_version
where r.project_id = $1 and ($2::text is null or r.kind = $2) and v.resource_id < $3
order by v.resource_id desc
limit $4;

-- name: list_aliases
select r.name, a.resource_id, a.alias, a.version, a.revision, a.updated_at
from resource r
join resource_alias a on a.resource_id = r.id
where r.project_id = $1 and r.name = $2
order by a.alias
limit 1000;

-- name: lock_alias
select a.revision from resource_alias a where a.resource_id = $1 and a.alias = $2 for update;

-- name: set_alias
insert into resource_alias (resource_id, alias, version) values ($1, $2, $3)
on conflict (resource_id, alias) do update set
    version = excluded.version, revision = resource_alias.revision + 1, xid = excluded.xid, updated_at = now()
returning revision, updated_at;

-- name: watch_bounds
select
    pg_snapshot_xmin(pg_current_snapshot())::text::bigint as settled,
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint as newest;

-- name: snapshot_resources
select r.id as resource_id, r.name, v.version, v.xid::text::bigint as xid, octet_length(v.content) as size_bytes,
    octet_length(v.metadata) as metadata_bytes
from resource r
join resource_version v on v.resource_id = r.id and v.version = r.last_version
where r.project_id = $1 and (cardinality($2::text[]) = 0 or r.kind = any ($2)) and starts_with(r.name, $3)
    and r.id > $4
order by r.id
limit $5;

-- name: aliases_of_resources
select r.name, a.resource_id, a.alias, a.version, a.revision, a.updated_at, a.xid::text::bigint as xid
from unnest($1::int[]) as x (id)
join resource r on r.id = x.id
join resource_alias a on a.resource_id = r.id
order by a.resource_id, a.alias;

-- name: versions_by_key
select r.name, r.kind, v.resource_id, v.version, v.content_type,
    case when octet_length(v.content) <= $3::int then v.content else ''::bytea end as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at, v.ttl_ms, v.expires_at,
    resource_dependencies(v.resource_id, v.version) as dependencies
from unnest($1::int[], $2::bigint[]) with ordinality as x (resource_id, version, n)
cross join lateral (
    select q.* from resource_version q where q.resource_id = x.resource_id and q.version = x.version limit 1
) v
join resource r on r.id = v.resource_id
order by x.n;

-- name: resource_changes
-- Versions (revision 0) and moves of aliases, in the order of the transactions that wrote them. Only those below the
-- oldest running transaction ($5) are read: none can appear behind a position that was sent.
select
    c.xid::text::bigint as xid, c.resource_id, c.version, c.alias, c.revision, c.name, c.updated_at, c.size_bytes,
    c.metadata_bytes
from (
    (
        select
            v.xid, v.resource_id, v.version, ''::text as alias, 0::bigint as revision, r.name,
            v.created_at as updated_at, octet_length(v.content) as size_bytes, octet_length(v.metadata) as metadata_bytes
        from resource_version v
        join resource r on r.id = v.resource_id
        where (v.xid, v.resource_id, v.version, ''::text) > ($4::bigint::text::xid8, $6::int, $7::bigint, $8::text)
            and v.xid < $5::bigint::text::xid8
            and r.project_id = $1 and (cardinality($2::text[]) = 0 or r.kind = any ($2)) and starts_with(r.name, $3)
        order by v.xid, v.resource_id, v.version
        limit $9
    )
    union all
    (
        select m.xid, m.resource_id, m.version, m.alias, m.revision, r.name, m.moved_at as updated_at, 0 as size_bytes,
            0 as metadata_bytes
        from resource_alias_move m
        join resource r on r.id = m.resource_id
        where (m.xid, m.resource_id, m.version, m.alias) > ($4::bigint::text::xid8, $6::int, $7::bigint, $8::text)
            and m.xid < $5::bigint::text::xid8
            and r.project_id = $1 and (cardinality($2::text[]) = 0 or r.kind = any ($2)) and starts_with(r.name, $3)
        order by m.xid, m.resource_id, m.version, m.alias
        limit $9
    )
) c
order by c.xid, c.resource_id, c.version, c.alias
limit $9;

-- name: version_lifetimes
-- Numbers are assigned without gaps: a missing number up to the last one was removed.
select r.name, r.id as resource_id, x.version, v.version is null as removed, v.expires_at is not null as expiring
from unnest($2::text[], $3::bigint[]) as x (name, version)
cross join lateral (
    select q.id, q.name, q.last_version from resource q where q.project_id = $1 and q.name = x.name limit 1
) r
left join lateral (
    select q.version, q.expires_at from resource_version q
    where q.resource_id = r.id and q.version = x.version limit 1
) v on true
where x.version <= r.last_version;

-- name: expired_versions
-- Referred to: by an alias or by an existing version.
select
    v.resource_id, v.version, v.expires_at,
    exists (
        select 1 from resource_alias a where a.resource_id = v.resource_id and a.version = v.version
    ) or exists (
        select 1 from resource_dependency d where d.needs_resource_id = v.resource_id and d.needs_version = v.version
    ) as referred_to
from resource_version v
where v.expires_at <= now() and (v.expires_at, v.resource_id, v.version) > ($1::timestamptz, $2::int, $3::bigint)
order by v.expires_at, v.resource_id, v.version
limit $4;

-- name: delete_ended_uses_of_version
-- Removes uses by ended rollouts among the oldest uses of one version. A scalar subquery probes the index per use; `exists`
-- may become a hash of the whole backlog.
with k as (
    select u.ctid as c, (select true from item i where i.id = u.rollout_id) is not null as live
    from resource_use u
    where u.resource_id = $1 and u.version = $2
    order by u.rollout_id
    limit $3
), d as (
    delete from resource_use u using k where u.ctid = k.c and not k.live
)
select count(*)::int as seen, (count(*) filter (where k.live))::int as live from k;

-- name: delete_ended_uses
-- The same for a page of all uses, by key; returns the last key that was read.
with k as (
    select
        u.ctid as c, u.resource_id, u.version, u.rollout_id,
        (select true from item i where i.id = u.rollout_id) is not null as live
    from resource_use u
    where (u.resource_id, u.version, u.rollout_id) > ($1::int, $2::bigint, $3::uuid)
    order by u.resource_id, u.version, u.rollout_id
    limit $4
), d as (
    delete from resource_use u using k where u.ctid = k.c and not k.live
)
select k.resource_id, k.version, k.rollout_id, count(*) over ()::int as seen
from k
order by k.resource_id desc, k.version desc, k.rollout_id desc
limit 1;

-- name: lock_versions
-- Versions locked by a transaction that is about to use them are skipped.
select v.resource_id, v.version
from unnest($1::int[], $2::bigint[]) as x (resource_id, version)
cross join lateral (
    select q.resource_id, q.version from resource_version q
    where q.resource_id = x.resource_id and q.version = x.version limit 1 for update skip locked
) v;

-- name: remove_versions
-- The versions are locked by this transaction; this statement sees everything committed before the locks.
with k as (
    select v.c
    from unnest($1::int[], $2::bigint[]) as x (resource_id, version)
    cross join lateral (
        select q.ctid as c from resource_version q
        where q.resource_id = x.resource_id and q.version = x.version and q.expires_at <= now() limit 1
    ) v
    where not exists (
        select 1 from resource_alias a where a.resource_id = x.resource_id and a.version = x.version
    ) and not exists (
        select 1 from resource_dependency d where d.needs_resource_id = x.resource_id and d.needs_version = x.version
    ) and not exists (
        select 1 from resource_use u where u.resource_id = x.resource_id and u.version = x.version
    )
)
delete from resource_version v using k where v.ctid = k.c
returning v.resource_id, v.version;
