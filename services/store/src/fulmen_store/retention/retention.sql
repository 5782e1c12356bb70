-- name: days_past_retention
-- Days with a partition that at least one project no longer needs.
select d.day from partition_days('span_chunk') as d (day)
where d.day < $1::date and (d.day + 1)::timestamp at time zone 'UTC' + (select min(p.retention) from project p) <= now()
order by d.day;

-- name: day_is_expired
select day_is_expired($1::date) as is_expired;

-- name: lock_retention
select pg_try_advisory_xact_lock($1::bigint) as is_mine;

-- name: drop_expired_partition
select drop_expired_partition('span_chunk', $1::date) as is_dropped;

-- name: expiring_projects
select p.id from project p where p.retention is not null order by p.id;

-- name: expired_rollouts
-- In order of their ends; live rollouts have an item and keep everything. Whole days of ids, so that a day's spans can be
-- dropped at once before.
select e.rollout_id
from project p
cross join lateral (
    select q.rollout_id from rollout_end q
    where q.project_id = p.id and q.rollout_id < uuid7_bound(date_trunc('day', now() - p.retention))
        and q.ended_at < now() - p.retention
        and not exists (select 1 from item i where i.id = q.rollout_id)
    order by q.xid, q.rollout_id limit $2
    for update
) e
where p.id = $1;

-- name: remove_chunks
delete from span_chunk q where q.rollout_id = any ($1::uuid[]) and true /* days */
returning q.rollout_id, q.blob, q.blob_size;

-- name: remove_attempts
delete from attempt a where a.rollout_id = any ($1::uuid[]);

-- name: remove_ends
delete from rollout_end e where e.rollout_id = any ($1::uuid[]);

-- name: remove_rollout_usage
delete from rollout_usage u where u.rollout_id = any ($1::uuid[]);

-- name: remove_rollouts
delete from rollout r where r.id = any ($1::uuid[]);

-- name: remove_annotations
-- After the rollouts: whoever adds one holds the row of its rollout.
delete from annotation a where a.rollout_id = any ($1::uuid[]);

-- name: remove_effects
delete from effect e where e.rollout_id = any ($1::uuid[]);

-- name: allow_bitmaps
-- For the rest of the transaction: block ranges (BRIN) are read by bitmaps alone.
select set_config('enable_bitmapscan', 'on', true);

-- name: remove_groups
-- Of a project: those that got their last member a day before its oldest rollout.
delete from rollout_group g where g.ctid = any (array(
    select q.ctid from rollout_group q
    where q.project_id = $1 and q.touched_at < (select unused_since($1))
    limit $2 for update skip locked
))
returning 1;

-- name: remove_runs
-- Of a project: the names of training runs without rollouts, usage and lease.
delete from training_run t where t.ctid = any (array(
    select q.ctid from training_run q
    where q.project_id = $1 and q.used_at < (select unused_since($1))
        and (select true from run_lease l where l.project_id = $1 and l.name = q.name) is null
        and (select true from usage_attempt u where u.project_id = $1 and u.run_id = q.id limit 1) is null
    order by q.used_at limit $2 for update skip locked
))
returning 1;

-- name: remove_names
-- Of a project: those that no rollout has, with the durations of their attempts.
delete from interned_name n where n.ctid = any (array(
    select q.ctid from interned_name q
    where q.project_id = $1 and q.used_at < (select unused_since($1))
        and (select true from lost_runner l where l.agent = q.id) is null
    order by q.used_at limit $2 for update skip locked
))
returning 1;

-- name: remove_retries
-- Those of a page, by key, whose rollout is gone; returns the last key that was read.
with k as (
    select t.ctid as c, t.rollout_id, (select true from rollout r where r.id = t.rollout_id) is null as gone
    from rollout_retry t
    where t.rollout_id > $1 and t.rollout_id < uuid7_bound(now() - (select min(p.retention) from project p))
    order by t.rollout_id
    limit $2
), d as (
    delete from rollout_retry t using k where t.ctid = k.c and k.gone
)
select k.rollout_id, count(*) over ()::int as seen from k order by k.rollout_id desc limit 1;
