-- The feed's order is (transaction id, rollout id) of the row that completed a group. Only rows below the oldest
-- running transaction are read: no row can appear behind a cursor that a client holds.

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

-- name: scan_group_feed
with b as (select pg_snapshot_xmin(pg_current_snapshot()) as xmin)
select
    e.xid::text::bigint as xid, e.rollout_id, e.group_key, (e.xid, e.rollout_id) = (g.xid, g.rollout_id) as completes
from (
    select q.xid, q.rollout_id, q.group_key, q.group_size from rollout_end q
    where q.group_key = $5 and q.project_id = $1 and (q.xid, q.rollout_id) > ($2::bigint::text::xid8, $3::uuid)
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
