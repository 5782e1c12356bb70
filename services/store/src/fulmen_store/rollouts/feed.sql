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
-- Compared and ordered by all columns of `rollout_end_by_run`: no other index can do that, whatever the statistics say.
with b as (select pg_snapshot_xmin(pg_current_snapshot()) as xmin)
select
    e.xid::text::bigint as xid, e.rollout_id, e.group_key,
    e.group_key is null or (e.xid, e.rollout_id) = (g.xid, g.rollout_id) as completes
from (
    select q.project_id, q.run_id, q.xid, q.rollout_id, q.group_key, q.group_size from rollout_end q
    where q.run_id is not null
        and (q.project_id, q.run_id, q.xid, q.rollout_id) > ($1, $5, $2::bigint::text::xid8, $3::uuid)
        and (q.project_id, q.run_id, q.xid) < ($1, $5, (select b.xmin from b))
    order by q.project_id, q.run_id, q.xid, q.rollout_id limit $4
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
-- In the order of the index of groups, so that no other is walked.
select m.group_key, m.rollout_id
from unnest($1::uuid[]) as x (group_key)
cross join lateral (
    select q.group_key, q.rollout_id from rollout_end q where q.group_key = x.group_key
    order by q.xid, q.rollout_id offset 0
) m
order by m.rollout_id;

-- name: feed_news
-- Of each project: the training runs with ends from a bound up to the oldest running transaction, which is the next bound;
-- how many ends that are, at most $3; and for how long the first committed end behind it has waited, seconds.
with b as (select pg_snapshot_xmin(pg_current_snapshot()) as xmin)
select
    x.project_id, (select b.xmin::text::bigint from b) as settled, n.run_ids, n.ends,
    extract(epoch from now() - h.ended_at)::float8 as waited_s
from unnest($1::int[], $2::bigint[]) as x (project_id, bound)
cross join lateral (
    select array_agg(distinct e.run_id) as run_ids, count(*)::int as ends
    from (
        select q.run_id from rollout_end q
        where q.project_id = x.project_id and q.xid >= x.bound::text::xid8 and q.xid < (select b.xmin from b)
        order by q.xid, q.rollout_id limit $3
    ) e
) n
left join lateral (
    select q.ended_at from rollout_end q
    where q.project_id = x.project_id and q.xid >= (select b.xmin from b)
    order by q.xid, q.rollout_id limit 1
) h on true;

-- name: newest_transaction
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
