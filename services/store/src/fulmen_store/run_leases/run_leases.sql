-- Leases of training runs. Every change of an owner is one row change under the row's lock, and fences take that lock
-- too: what a transaction wrote under an epoch is committed before the next epoch begins, or is refused.

-- name: create_run_leases
-- In one order, whatever the caller's is; the caller rolls back if a row is missing.
insert into run_lease (
    project_id, name, policy, state, owner, owner_address, epoch, released, expires_at, record, request_id,
    storage
)
select $1, r.name, r.policy, 2, '', '', 0, true, now(), r.record, r.request_id, $6
from unnest($2::text[], $3::text[], $4::bytea[], $5::text[]) as r (name, policy, record, request_id)
order by r.name
on conflict do nothing
returning *;

-- name: acquire_run_lease
update run_lease l set
    owner = $3, owner_address = $4, epoch = greatest(l.epoch, $6::bigint) + 1, released = false, swept = false,
    claims_policy = not $8, expires_at = now() + $5::float8 * interval '1 second', updated_at = now()
where l.project_id = $1 and l.name = $2 and l.storage = $7
    and (l.released or l.expires_at <= now() or l.owner = $3)
returning *;

-- name: get_run_lease
select l.*, not l.released and l.expires_at > now() as held from run_lease l where l.project_id = $1 and l.name = $2;

-- name: owned_run_of_policy
select l.name, l.owner_address from run_lease l
where l.project_id = $1 and not l.released and l.claims_policy and l.name <> $2
    and l.policy <> '' and l.policy = (select q.policy from run_lease q where q.project_id = $1 and q.name = $2);

-- name: renew_run_leases
with r as (
    select x.project_id, x.name, x.epoch, x.record
    from unnest($1::int[], $2::text[], $3::bigint[], $4::bytea[]) as x (project_id, name, epoch, record)
), k as (
    -- In one order, whatever the caller's is.
    select l.ctid as c, r.record from r
    join run_lease l on l.project_id = r.project_id and l.name = r.name
    where l.epoch = r.epoch and l.owner = $5 and not l.released
    order by l.project_id, l.name
    for update of l
)
update run_lease l set
    expires_at = now() + $7::float8 * interval '1 second', owner_address = $6, updated_at = now(), state = 3,
    record = case when length(k.record) > 0 then k.record else l.record end
from k where l.ctid = k.c
returning l.project_id, l.name;

-- name: release_run_lease
update run_lease l set
    released = true, expires_at = least(l.expires_at, now()), state = $4, record = $5, updated_at = now()
where l.project_id = $1 and l.name = $2 and l.epoch = $3
returning l.name;

-- name: hold_run_epoch
-- Until the end of the transaction no other service can acquire the run.
select l.epoch from run_lease l where l.project_id = $1 and l.name = $2 for share;

-- name: list_run_leases
-- Ordered by project and name; records of at most $6 bytes, but at least one row.
with p as (
    select l.project_id, l.name,
        case when $7 then 0 else sum(length(l.record)) over (order by l.project_id, l.name) - length(l.record) end as before
    from run_lease l
    where (l.project_id, l.name) > ($1::int, $2::text)
        and ($3::int[] is null or l.project_id = any ($3))
        and l.updated_at >= coalesce($4, '-infinity'::timestamptz)
        and ($5::float8 is null or (l.state <> 1 and l.expires_at <= now() - $5 * interval '1 second'))
    order by l.project_id, l.name
    limit $8
)
select
    l.project_id, l.name, l.policy, l.state, l.owner, l.owner_address, l.epoch, l.expires_at, l.updated_at,
    l.storage,
    not l.released and l.expires_at > now() as held, case when $7 then ''::bytea else l.record end as record
from p join run_lease l on l.project_id = p.project_id and l.name = p.name
where p.before < $6
order by l.project_id, l.name;

-- name: unowned_runs
-- Runs that were run, and that nothing has run for $1 seconds; a run that only waits for its first slot has no rollouts. None if
-- the clock does not show what is expected, $3 within $4: it was set, and the caller has not seen it yet.
select l.project_id, l.name, l.epoch from run_lease l
where l.state <> 1 and l.expires_at <= now() - $1::float8 * interval '1 second'
    and (l.state = 3 or not l.released) and not l.swept
    and abs(extract(epoch from now())::float8 - $3::float8) <= $4::float8
order by l.expires_at limit $2;

-- name: count_unowned_runs
select count(*) as count from run_lease l
where l.state <> 1 and l.expires_at <= now() - $1::float8 * interval '1 second' and (l.state = 3 or not l.released);

-- name: mark_run_swept
update run_lease l set swept = true where l.project_id = $1 and l.name = $2 and l.epoch = $3;

-- name: remove_expired_runs
delete from run_lease l where l.ctid = any (array(
    select q.ctid from run_lease q join project p on p.id = q.project_id
    where q.state = 1 and q.updated_at < now() - p.retention
    order by q.updated_at limit $1 for update of q skip locked
))
returning 1;

-- name: store_clock
select now() as now;
