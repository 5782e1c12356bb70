-- name: expired_days
-- All tables: a store that was killed between two of them may have left partitions.
select d.day from (
    select partition_days('rollout') union select partition_days('attempt')
    union select partition_days('rollout_end') union select partition_days('span_chunk')
) as d (day)
where d.day < $1::date
    and (d.day + 1)::timestamp at time zone 'UTC' + (select min(p.retention) from project p) <= now()
    and day_is_expired(d.day)
order by d.day;

-- name: lock_retention
select pg_try_advisory_xact_lock($1::bigint) as is_mine;

-- name: drop_expired_partition
select drop_expired_partition($1::text, $2::date) as is_dropped;

-- name: has_partition
select exists (select 1 from partition_days($1::text) as d (day) where d.day = $2::date) as has;

-- name: expiring_projects
select p.id from project p where p.retention is not null order by p.id;

-- name: expired_rollouts
-- In order of their ends; live rollouts have an item and keep everything.
select e.rollout_id
from project p
cross join lateral (
    select q.rollout_id from rollout_end q
    where q.project_id = p.id and q.rollout_id < uuid7_bound(now() - p.retention)
        and q.ended_at < now() - p.retention
        and not exists (select 1 from item i where i.id = q.rollout_id)
    order by q.xid, q.rollout_id limit $2
    for update
) e
where p.id = $1;

-- name: remove_chunks
delete from span_chunk c where c.rollout_id = any ($1::uuid[])
returning c.rollout_id, c.blob, c.blob_size;

-- name: remove_attempts
delete from attempt a where a.rollout_id = any ($1::uuid[]);

-- name: remove_ends
delete from rollout_end e where e.rollout_id = any ($1::uuid[]);

-- name: remove_rollouts
delete from rollout r where r.id = any ($1::uuid[]);

-- name: allow_bitmaps
-- For the rest of the transaction: block ranges (BRIN) are read by bitmaps alone.
select set_config('enable_bitmapscan', 'on', true);

-- name: remove_groups
-- Of a project: those that got their last member a day before its oldest rollout.
with o as (
    select coalesce(
        to_timestamp(('x' || left(replace(min(x.id::text), '-', ''), 12))::bit(48)::bigint / 1000.0), now()
    ) - interval '1 day' as oldest_at
    from (select q.id from rollout q where q.project_id = $1 order by q.id limit 1) x
)
delete from rollout_group g where g.ctid = any (array(
    select q.ctid from rollout_group q
    where q.project_id = $1 and q.touched_at < (select o.oldest_at from o)
    limit $2 for update skip locked
))
returning g.group_key;
