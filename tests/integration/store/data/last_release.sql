-- The statements of the last release (0.1, whose schema is 0001), as they were: it must run on the new schema. Not edited.

-- From rollouts.sql.
-- Three rules keep every plan a point look-up whatever the statistics say: rows are found by `cross join lateral (...
-- limit 1)`, they are changed by ctid, and two CTEs are never joined.

-- name: ensure_project
insert into project (name) values ($1) on conflict (name) do update set name = excluded.name
returning id, weight;

-- name: ensure_training_run
insert into training_run (project_id, name) values ($1, $2)
on conflict (project_id, name) do update set name = excluded.name
returning id;

-- name: find_training_run
select id from training_run where project_id = $1 and name = $2;

-- name: create_rollouts
with r as (
    insert into rollout (
        id, project_id, run_id, group_key, group_size, rank, run_at, max_attempts, retry_mask, backoff_ms, labels,
        request
    )
    select
        x.id, x.project_id, x.run_id, x.group_key, x.group_size, x.rank,
        coalesce(x.run_at, now()), x.max_attempts, x.retry_mask, x.backoff_ms,
        case when x.labels = '' then null else string_to_array(x.labels, e'\x1f') end, x.request
    from unnest(
        $1::uuid[], $2::int[], $3::int[], $4::uuid[], $5::smallint[], $6::smallint[], $7::timestamptz[],
        $8::smallint[], $9::int[], $10::int[], $11::text[], $12::bytea[]
    ) as x (
        id, project_id, run_id, group_key, group_size, rank, run_at, max_attempts, retry_mask, backoff_ms, labels,
        request
    )
    on conflict do nothing
    returning
        id, project_id, run_id, group_key, group_size, rank, run_at, max_attempts, retry_mask, backoff_ms, labels
), g as (
    insert into rollout_group as old (group_key, size, created)
    select r.group_key, max(r.group_size), count(*) from r where r.group_key is not null group by r.group_key
    order by r.group_key
    on conflict (group_key) do update set
        created = old.created + excluded.created,
        size = case when old.size = excluded.size then old.size end
)
insert into item (
    id, project_id, run_id, group_key, group_size, rank, run_at, max_attempts, retry_mask, backoff_ms, labels
)
select
    r.id, r.project_id, r.run_id, r.group_key, r.group_size, r.rank, r.run_at, r.max_attempts, r.retry_mask,
    r.backoff_ms, r.labels
from r
returning id;

-- name: stored_requests
select r.id, r.project_id, r.request
from unnest($1::uuid[]) as x (id)
cross join lateral (select q.id, q.project_id, q.request from rollout q where q.id = x.id limit 1) r;

-- name: get_rollouts
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, i.host, i.delayed,
    e.state as end_state, e.failure_kind, e.ended_at
from unnest($1::uuid[]) with ordinality as x (id, n)
cross join lateral (
    select q.id, q.project_id, q.request, q.created_at from rollout q where q.id = x.id limit 1
) r
left join lateral (
    select
        q.epoch, q.session, q.leased_at, q.run_at > now() as delayed,
        (select s.host from runner_session s where s.id = q.session) as host
    from item q where q.id = x.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at from rollout_end q where q.rollout_id = x.id limit 1
) e on true
order by x.n;

-- name: get_attempts
select
    a.rollout_id, a.number, a.state, a.failure_kind, a.rollout_state, a.session, a.started_at, a.ended_at, a.report,
    a.host
from unnest($1::uuid[]) as x (id)
cross join lateral (
    select
        q.rollout_id, q.number, q.state, q.failure_kind, q.rollout_state, q.session, q.started_at, q.ended_at,
        q.report, (select s.host from runner_session s where s.id = q.session) as host
    from attempt q where q.rollout_id = x.id
) a
order by a.rollout_id, a.number;

-- name: list_project_rollouts
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, null::text as host, i.delayed,
    e.state as end_state, e.failure_kind, e.ended_at
from rollout r
left join lateral (
    select q.epoch, q.session, q.leased_at, q.run_at > now() as delayed from item q where q.id = r.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at from rollout_end q where q.rollout_id = r.id limit 1
) e on true
where r.project_id = $1 and r.id < $2
    and ($3::smallint[] is null or coalesce(
        e.state, case when i.session is not null then 2 when i.delayed and i.epoch > 0 then 3 else 1 end
    ) = any ($3))
order by r.id desc
limit $4;

-- name: list_run_rollouts
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, null::text as host, i.delayed,
    e.state as end_state, e.failure_kind, e.ended_at
from rollout r
left join lateral (
    select q.epoch, q.session, q.leased_at, q.run_at > now() as delayed from item q where q.id = r.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at from rollout_end q where q.rollout_id = r.id limit 1
) e on true
where r.project_id = $1 and r.run_id = $5 and r.id < $2
    and ($3::smallint[] is null or coalesce(
        e.state, case when i.session is not null then 2 when i.delayed and i.epoch > 0 then 3 else 1 end
    ) = any ($3))
order by r.id desc
limit $4;

-- name: live_rollouts_of_run
select i.id from item i where i.project_id = $1 and i.run_id = $2 and not i.cancel_requested limit $3;

-- name: cancel_rollouts
with k as (
    select i.c, i.session
    from unnest($1::uuid[]) as x (id)
    cross join lateral (select q.ctid as c, q.session from item q where q.id = x.id limit 1 for update) i
), d as (
    delete from item i using k where i.ctid = k.c and k.session is null
    returning i.id, i.project_id, i.run_id, i.group_key, i.group_size
), e as (
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind)
    select d.id, d.project_id, d.run_id, d.group_key, d.group_size, 6, 6 from d
), u as (
    update item i set cancel_requested = true from k where i.ctid = k.c and k.session is not null
    returning i.id, i.session, i.epoch, i.project_id
)
select d.id, null::uuid as session, 0 as epoch, d.project_id from d
union all
select u.id, u.session, u.epoch, u.project_id from u;

-- name: queue_stats
select
    count(*) filter (where i.session is null and i.run_at <= now()) as queued,
    count(*) filter (where i.session is not null) as running,
    count(*) filter (where i.session is null and i.run_at > now()) as delayed,
    extract(epoch from now() - min(i.run_at) filter (where i.session is null and i.run_at <= now()))::float8
        as oldest_age_s,
    (select count(*) from runner_session s where s.ended_at is null and s.lease_until > now()) as runners
from item i
where i.project_id = $1 and ($2::int is null or i.run_id = $2);

-- name: log_request
insert into request_log (project_id, method, request_id, result) values ($1, $2, $3, $4)
on conflict (project_id, method, request_id) do nothing
returning result;

-- name: logged_request
select result from request_log where project_id = $1 and method = $2 and request_id = $3;

-- From leases.sql.
-- Claims and ends of attempts are compare-and-set on (rollout, lease session, epoch). A row that was locked but has
-- changed since the statement's snapshot is simply not returned; the caller classifies and repeats.

-- name: claim_rollouts
with k as (
    select x.session, i.c
    from unnest($1::uuid[], $2::uuid[]) as x (id, session)
    cross join lateral (
        select q.ctid as c from item q
        where q.id = x.id and q.session is null and q.run_at <= now() limit 1 for update skip locked
    ) i
), u as (
    update item i set session = k.session, epoch = i.epoch + 1, leased_at = now()
    from k where i.ctid = k.c
    returning i.id, i.session, i.epoch, i.project_id
)
select u.id, u.session, u.epoch, u.project_id, r.request
from u
cross join lateral (select q.request from rollout q where q.id = u.id limit 1) r;

-- name: held_leases
select i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested
from unnest($1::uuid[]) as x (id)
cross join lateral (
    select q.id, q.session, q.epoch, q.project_id, q.charged, q.max_attempts, q.retry_mask, q.backoff_ms,
        q.cancel_requested
    from item q where q.id = x.id and q.session is not null limit 1
) i;

-- name: session_leases
select i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested
from item i where i.session = any ($1::uuid[]);

-- name: orphaned_leases
select i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested
from item i
where i.session is not null
    and not exists (select 1 from runner_session s where s.id = i.session and s.ended_at is null)
limit $1;

-- name: end_attempts
with k as (
    select
        x.state, x.kind, x.rollout_state, x.delay_s, x.charge, x.report, i.c, i.session, i.leased_at
    from unnest(
        $1::uuid[], $2::uuid[], $3::int[], $4::boolean[], $5::smallint[], $6::smallint[], $7::smallint[],
        $8::float8[], $9::smallint[], $10::bytea[]
    ) as x (id, session, epoch, cancel_requested, state, kind, rollout_state, delay_s, charge, report)
    cross join lateral (
        select q.ctid as c, q.session, q.leased_at from item q
        where q.id = x.id and q.session = x.session and q.epoch = x.epoch and q.cancel_requested = x.cancel_requested
        limit 1 for update
    ) i
), d as (
    delete from item i using k where i.ctid = k.c and k.rollout_state in (4, 5, 6)
    returning
        i.id, i.epoch, i.project_id, i.run_id, i.group_key, i.group_size, i.rank, i.labels, k.session, k.leased_at,
        k.state, k.kind, k.rollout_state, k.report
), u as (
    update item i set
        session = null, leased_at = null, cancel_requested = false, charged = i.charged + k.charge,
        run_at = now() + k.delay_s * interval '1 second'
    from k where i.ctid = k.c and k.rollout_state = 3
    returning
        i.id, i.epoch, i.project_id, i.run_id, i.group_key, i.group_size, i.rank, i.labels, k.session, k.leased_at,
        k.state, k.kind, k.rollout_state, k.report
), a as (
    insert into attempt (
        rollout_id, number, state, failure_kind, rollout_state, session, started_at, report
    )
    select d.id, d.epoch, d.state, d.kind, d.rollout_state, d.session, d.leased_at, d.report from d
    union all
    select u.id, u.epoch, u.state, u.kind, u.rollout_state, u.session, u.leased_at, u.report from u
), e as (
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind)
    select
        d.id, d.project_id, d.run_id, d.group_key, d.group_size, d.rollout_state,
        case d.rollout_state when 4 then 0 when 6 then 6 else d.kind end
    from d
)
select d.id, d.epoch, d.session, d.project_id, d.rank, d.labels, d.rollout_state from d
union all
select u.id, u.epoch, u.session, u.project_id, u.rank, u.labels, u.rollout_state from u;

-- name: ended_attempts
select a.rollout_id, a.number, a.session, a.failure_kind, a.report
from unnest($1::uuid[], $2::int[]) as x (id, number)
cross join lateral (
    select q.rollout_id, q.number, q.session, q.failure_kind, q.report from attempt q
    where q.rollout_id = x.id and q.number = x.number limit 1
) a;

-- name: refill_queue
select
    i.id, i.project_id, i.rank, i.labels,
    greatest(extract(epoch from i.run_at - now()), 0)::float8 as delay_s
from item i
where i.project_id = $1 and (i.rank, i.id) > ($2, $3) and i.session is null
order by i.rank, i.id
limit $4;

-- name: all_projects
select p.id, p.name, p.weight from project p order by p.id;

-- name: open_session
insert into runner_session (id, subject, host, info, lease_until)
values ($1, $2, $3, $4, now() + $5 * interval '1 second');

-- name: resume_session
update runner_session s set lease_until = now() + $2 * interval '1 second'
where s.id = $1 and s.ended_at is null and s.subject = $3
returning s.id;

-- name: renew_sessions
update runner_session s set lease_until = now() + $2 * interval '1 second'
where s.id = any ($1::uuid[]) and s.ended_at is null
returning s.id;

-- name: end_sessions
update runner_session s set ended_at = now()
where s.id = any ($1::uuid[]) and s.ended_at is null
returning s.id;

-- name: end_expired_sessions
update runner_session s set ended_at = now()
where s.ended_at is null and s.lease_until < now()
returning s.id;

-- name: list_sessions
select
    s.id, s.info, s.opened_at, s.lease_until,
    (select count(*) from item i where i.session = s.id) as running
from runner_session s
where s.ended_at is null and s.id > $1
order by s.id
limit $2;

-- name: find_session
select
    s.id, s.info, s.opened_at, s.lease_until,
    (select count(*) from item i where i.session = s.id) as running
from runner_session s
where s.ended_at is null and s.id = $1;

-- From feed.sql.
-- The feed's order is (transaction id, rollout id) of the row that completed a group. Only rows below the oldest
-- transaction that still runs are looked at: no row can appear behind a cursor that was handed out.

-- name: scan_project_feed
with b as (select pg_snapshot_xmin(pg_current_snapshot()) as xmin)
select
    e.xid::text::bigint as xid, e.rollout_id, e.group_key,
    e.group_key is null or (e.xid, e.rollout_id) = (g.xid, g.rollout_id) as completes
from (
    select q.xid, q.rollout_id, q.group_key, q.group_size from rollout_end q
    where q.project_id = $1 and (q.xid, q.rollout_id) > ($2::bigint::text::xid8, $3::uuid)
        and q.xid < (select b.xmin from b)
    order by q.xid, q.rollout_id limit $4
) e
left join lateral (
    select m.xid, m.rollout_id from rollout_end m
    where m.group_key = e.group_key and m.xid < (select b.xmin from b)
    order by m.xid, m.rollout_id offset e.group_size - 1 limit 1
) g on true
order by e.xid, e.rollout_id;

-- name: scan_run_feed
with b as (select pg_snapshot_xmin(pg_current_snapshot()) as xmin)
select
    e.xid::text::bigint as xid, e.rollout_id, e.group_key,
    e.group_key is null or (e.xid, e.rollout_id) = (g.xid, g.rollout_id) as completes
from (
    select q.xid, q.rollout_id, q.group_key, q.group_size from rollout_end q
    where q.project_id = $1 and q.run_id = $5 and (q.xid, q.rollout_id) > ($2::bigint::text::xid8, $3::uuid)
        and q.xid < (select b.xmin from b)
    order by q.xid, q.rollout_id limit $4
) e
left join lateral (
    select m.xid, m.rollout_id from rollout_end m
    where m.group_key = e.group_key and m.xid < (select b.xmin from b)
    order by m.xid, m.rollout_id offset e.group_size - 1 limit 1
) g on true
order by e.xid, e.rollout_id;

-- name: group_members
select m.group_key, m.rollout_id
from unnest($1::uuid[]) as x (group_key)
cross join lateral (
    select q.group_key, q.rollout_id from rollout_end q where q.group_key = x.group_key
) m
order by m.rollout_id;

-- name: newest_transaction
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- From spans.sql.
-- name: append_chunks
with k as (
    select
        x.n, x.rollout_id, x.attempt, x.chunk_id, x.span_count, x.codec, x.start_ns, x.end_ns, x.payload,
        r.id is not null as known
    from unnest(
        $1::uuid[], $2::int[], $3::uuid[], $4::int[], $5::smallint[], $6::bigint[], $7::bigint[], $8::bytea[],
        $9::int[]
    ) with ordinality as x (
        rollout_id, attempt, chunk_id, span_count, codec, start_ns, end_ns, payload, project_id, n
    )
    left join lateral (
        select q.id from rollout q
        where q.id = x.rollout_id and (x.project_id is null or q.project_id = x.project_id) limit 1
    ) r on true
), i as (
    insert into span_chunk (rollout_id, attempt, chunk_id, span_count, codec, start_ns, end_ns, payload)
    select k.rollout_id, k.attempt, k.chunk_id, k.span_count, k.codec, k.start_ns, k.end_ns, k.payload
    from k where k.known
    on conflict do nothing
)
select k.n::int as n from k where not k.known;

-- name: read_chunks
select
    c.rollout_id, c.attempt, c.chunk_id, c.span_count, c.codec, c.start_ns, c.end_ns, c.payload
from unnest($1::uuid[], $2::int[]) with ordinality as x (rollout_id, attempt, n)
cross join lateral (
    select q.id from rollout q
    where q.id = x.rollout_id and ($3::int is null or q.project_id = $3) limit 1
) r
cross join lateral (
    select q.rollout_id, q.attempt, q.chunk_id, q.span_count, q.codec, q.start_ns, q.end_ns, q.payload
    from span_chunk q
    where q.rollout_id = x.rollout_id and (x.attempt = 0 or q.attempt = x.attempt)
) c
order by x.n, c.chunk_id;

-- From resources.sql.
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

-- From upkeep.sql.
-- name: create_partitions
call create_day_partitions($1::date);

-- name: forget_requests
delete from request_log where created_at < now() - interval '24 hours';
