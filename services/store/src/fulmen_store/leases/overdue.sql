-- Overdue attempts and rollouts. Leases are found through `item_leased`, deadlines of waiting rollouts through
-- `item_by_deadline`: the cost depends on running and overdue rows, never on waiting ones.

-- name: overdue_attempts
-- What was leased before $3, Unix seconds, is $4 seconds younger than it seems: the clock was set ahead then. None is overdue if
-- the clock does not show what is expected, $5 within $6: it was set, and the caller has not seen it yet.
select
    i.id, i.project_id, i.session, i.epoch,
    case when i.cancel_by <= now() then 1 when i.deadline <= now() then 2 else 3 end as reason
from item i
where i.session is not null and abs(extract(epoch from now())::float8 - $5::float8) <= $6::float8
    and (
        i.cancel_by <= now()
        or i.deadline <= now()
        or i.leased_at
            + least(i.timeout_ms, case when i.bound_epoch = i.epoch then i.bound_ms end) * interval '1 millisecond' + $1::float8 * interval '1 second'
            + case when i.leased_at < to_timestamp($3::float8) then $4::float8 else 0 end * interval '1 second' <= now()
    )
limit $2;

-- name: fail_overdue_rollouts
with k as (
    select q.ctid as c from item q
    where q.deadline <= now() and q.session is null
    order by q.deadline limit $1 for update skip locked
), d as (
    delete from item i using k where i.ctid = k.c
    returning
        i.id, i.project_id, i.run_id, i.group_key, i.group_size, i.sort_priority, i.labels, i.task_type, i.agent
), c as (
    insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live)
    select d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent, -count(*) from d
    group by d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent
), e as (
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind)
    select d.id, d.project_id, d.run_id, d.group_key, d.group_size, 5, 2 from d
)
select d.project_id from d;
