-- name: next_version
insert into resource (project_id, name, kind, last_version) values ($1, $2, $3, 1)
on conflict (project_id, name) do update set last_version = resource.last_version + 1
returning id, kind, last_version;

-- name: add_version
insert into resource_version (resource_id, version, content_type, content, sha256, parent, metadata)
values ($1, $2, $3, $4, $5, $6, $7)
returning created_at;

-- name: move_latest
insert into resource_alias (resource_id, alias, version) values ($1, 'latest', $2)
on conflict (resource_id, alias) do update set
    version = excluded.version, revision = resource_alias.revision + 1, xid = excluded.xid, updated_at = now();

-- name: version_by_number
select r.name, r.kind, v.resource_id, v.version, v.content_type, v.content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at
from resource r
join resource_version v on v.resource_id = r.id
where r.project_id = $1 and r.name = $2 and v.version = $3;

-- name: version_by_alias
select r.name, r.kind, v.resource_id, v.version, v.content_type, v.content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at
from resource r
join resource_alias a on a.resource_id = r.id
join resource_version v on v.resource_id = r.id and v.version = a.version
where r.project_id = $1 and r.name = $2 and a.alias = $3;

-- name: list_versions
select r.name, r.kind, v.resource_id, v.version, v.content_type, ''::bytea as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at
from resource r
join resource_version v on v.resource_id = r.id
where r.project_id = $1 and r.name = $2 and ($3::text is null or r.kind = $3) and v.version < $4
order by v.version desc
limit $5;

-- name: list_latest
select r.name, r.kind, v.resource_id, v.version, v.content_type, ''::bytea as content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at
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
order by a.alias;

-- name: find_version
select v.resource_id from resource r
join resource_version v on v.resource_id = r.id
where r.project_id = $1 and r.name = $2 and v.version = $3;

-- name: lock_alias
select a.revision from resource_alias a where a.resource_id = $1 and a.alias = $2 for update;

-- name: set_alias
insert into resource_alias (resource_id, alias, version) values ($1, $2, $3)
on conflict (resource_id, alias) do update set
    version = excluded.version, revision = resource_alias.revision + 1, xid = excluded.xid, updated_at = now()
returning revision, updated_at;

-- name: oldest_transaction
select pg_snapshot_xmin(pg_current_snapshot())::text::bigint;

-- name: snapshot_versions
select r.name, r.kind, v.resource_id, v.version, v.content_type, v.content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at
from resource r
join resource_version v on v.resource_id = r.id and v.version = r.last_version
where r.project_id = $1 and (cardinality($2::text[]) = 0 or r.kind = any ($2)) and starts_with(r.name, $3)
order by v.resource_id;

-- name: changed_versions
select r.name, r.kind, v.resource_id, v.version, v.content_type, v.content, v.sha256, octet_length(v.content) as size_bytes,
    v.parent, v.metadata, v.created_at
from resource_version v
join resource r on r.id = v.resource_id
where v.xid >= $4::bigint::text::xid8
    and r.project_id = $1 and (cardinality($2::text[]) = 0 or r.kind = any ($2)) and starts_with(r.name, $3)
order by v.resource_id, v.version;

-- name: changed_aliases
select r.name, a.resource_id, a.alias, a.version, a.revision, a.updated_at
from resource_alias a
join resource r on r.id = a.resource_id
where a.xid >= $4::bigint::text::xid8
    and r.project_id = $1 and (cardinality($2::text[]) = 0 or r.kind = any ($2)) and starts_with(r.name, $3)
order by a.resource_id, a.alias;
