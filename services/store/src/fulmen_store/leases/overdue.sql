-- Overdue attempts and rollouts. Leases are found through `item_leased`, deadlines of waiting rollouts through
-- `item_by_deadline`: the cost depends on running and overdue rows, never on waiting ones.

-- name: overdue_attempts
select
    i.id, i.project_id, i.session, i.epoch,
    case when i.cancel_by <= now() then 1 when i.deadline <= now() then 2 else 3 end as reason
from item i
where i.session is not null
    and (
        i.cancel_by <= now()
        or i.deadline <= now()
        or i.leased_at + i.timeout_ms * interval '1 millisecond' + $1::float8 * interval '1 second' <= now()
    )
limit $2;

-- name: fail_overdue_rollouts
with k as (
    select q.ctid as c from item q
    where q.deadline <= now() and q.session is null
    order by q.deadline limit $1 for update skip locked
), d as (
    delete from item i using k where i.ctid = k.c
    returning i.id, i.project_id, i.run_id, i.group_key, i.group_size
), e as (
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind)
    select d.id, d.project_id, d.run_id, d.group_key, d.group_size, 5, 2 from d
)
select d.project_id from d;
