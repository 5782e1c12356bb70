-- Three rules keep every plan a point lookup whatever the statistics say; see rollouts.sql.

-- name: check_attempts
-- One row per requested attempt, in order; none for unknown rollouts. A lease that is not held has no epoch here:
-- hedge_epoch keeps its value after its lease has ended.
select
    x.n, r.mode, p.name as project,
    i.epoch as lease_epoch, i.hedge_epoch, i.cancel_requested, a.state,
    coalesce((select t.name from training_run t where t.id = r.run_id), '') as training_run,
    coalesce((select n.name from interned_name n where n.id = r.agent), '') as agent
from unnest($1::uuid[], $2::int[]) with ordinality as x (id, number, n)
cross join lateral (select q.project_id, q.mode, q.run_id, q.agent from rollout q where q.id = x.id limit 1) r
cross join lateral (select q.name from project q where q.id = r.project_id limit 1) p
left join lateral (
    select q.epoch, case when q.hedge_session is not null then q.hedge_epoch end as hedge_epoch, q.cancel_requested
    from item q where q.id = x.id and q.session is not null limit 1
) i on true
left join lateral (
    select q.state from attempt q where q.rollout_id = x.id and q.number = x.number limit 1
) a on true;
