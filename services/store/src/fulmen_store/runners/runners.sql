-- With a project ($3, $2): only sessions that may serve it, with their attempts of it; counts of ended attempts only if the
-- session serves that project alone. Earlier loads only if $4. At most 1000 running attempts are listed.

-- name: list_runners
select
    s.id, s.info, s.opened_at, s.lease_until, s.load, s.ended_count, s.failed_count, w.running, w.rollouts, w.epochs, w.projects,
    s.project, s.order_number, s.done_order, s.ordered_slots, s.drain_ordered, s.drain_grace_s,
    s.load_minutes, s.loads
from (
    select
        q.id, q.info, q.opened_at, q.lease_until, q.load, q.project, q.order_number, q.done_order, q.ordered_slots,
        q.drain_ordered, q.drain_grace_s,
        case when $4::boolean then q.load_minutes else '{}' end as load_minutes,
        case when $4::boolean then q.loads else '{}' end as loads,
        case when $3::text is null or q.project = $3 then q.ended_count else 0 end as ended_count,
        case when $3::text is null or q.project = $3 then q.failed_count else 0 end as failed_count
    from runner_session q
    where q.ended_at is null and q.id > $1 and ($3::text is null or q.project in ($3, 'projects/*'))
    order by q.id
    limit $2
) s
cross join lateral (
    select
        count(*)::int as running, (array_agg(i.id order by i.id))[1:1000] as rollouts,
        (array_agg(i.epoch order by i.id))[1:1000] as epochs,
        (array_agg(i.project_id order by i.id))[1:1000] as projects
    from (
        select q.id, q.epoch, q.project_id from item q where q.session = s.id
        union all
        select q.id, q.hedge_epoch, q.project_id from item q where q.hedge_session = s.id
    ) i
    where ($3::text is null or i.project_id = (select p.id from project p where p.name = $3))
) w
order by s.id;

-- name: find_runner
select
    s.id, s.info, s.opened_at, s.lease_until, s.load, s.ended_count, s.failed_count, w.running, w.rollouts, w.epochs, w.projects,
    s.project, s.order_number, s.done_order, s.ordered_slots, s.drain_ordered, s.drain_grace_s,
    '{}'::timestamptz[] as load_minutes, '{}'::bytea[] as loads
from (
    select
        q.id, q.info, q.opened_at, q.lease_until, q.load, q.project, q.order_number, q.done_order, q.ordered_slots,
        q.drain_ordered, q.drain_grace_s,
        case when $2::text is null or q.project = $2 then q.ended_count else 0 end as ended_count,
        case when $2::text is null or q.project = $2 then q.failed_count else 0 end as failed_count
    from runner_session q
    where q.ended_at is null and q.id = $1 and ($2::text is null or q.project in ($2, 'projects/*'))
) s
cross join lateral (
    select
        count(*)::int as running, (array_agg(i.id order by i.id))[1:1000] as rollouts,
        (array_agg(i.epoch order by i.id))[1:1000] as epochs,
        (array_agg(i.project_id order by i.id))[1:1000] as projects
    from (
        select q.id, q.epoch, q.project_id from item q where q.session = s.id
        union all
        select q.id, q.hedge_epoch, q.project_id from item q where q.hedge_session = s.id
    ) i
    where ($2::text is null or i.project_id = (select p.id from project p where p.name = $2))
) w;
