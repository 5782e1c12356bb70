-- Deletion of ended rollouts. Their rows are locked in the order of their ids, then those of their groups.

-- name: hold_ended
-- A training run is under way until it is paused or has ended, or nothing has run it for long.
select
    e.rollout_id, e.group_key,
    exists (
        select 1 from training_run t join run_lease l on l.project_id = t.project_id and l.name = t.name
        where t.id = e.run_id and l.state <> 1 and not l.swept
    ) as is_needed
from unnest($1::uuid[]) as x (id)
cross join lateral (
    select q.rollout_id, q.group_key, q.run_id from rollout_end q where q.rollout_id = x.id limit 1 for update
) e;

-- name: hold_groups
select
    g.group_key,
    g.created > (select count(*) from rollout_end q where q.group_key = g.group_key) as is_open
from rollout_group g where g.group_key = any ($1::uuid[])
order by g.group_key
for update;

-- name: remove_retry_marks
delete from rollout_retry t where t.rollout_id = any ($1::uuid[]);

-- name: remove_whole_groups
delete from rollout_group g
using unnest($1::uuid[], $2::smallint[]) as x (group_key, removed)
where g.group_key = x.group_key and g.created <= x.removed;

-- name: shrink_groups
update rollout_group g set created = g.created - x.removed
from unnest($1::uuid[], $2::smallint[]) as x (group_key, removed)
where g.group_key = x.group_key and g.created > x.removed;
