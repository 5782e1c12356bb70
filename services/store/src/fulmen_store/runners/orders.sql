-- Orders to runners.

-- name: order_runner
update runner_session s set
    order_number = s.order_number + 1,
    ordered_slots = coalesce($2::int, s.ordered_slots),
    drain_ordered = s.drain_ordered or $3,
    drain_grace_s = case when $3 then $4::float8 else s.drain_grace_s end
where s.id = $1 and s.ended_at is null
returning s.id;

-- name: pending_orders
select s.id, s.order_number, s.ordered_slots, s.drain_ordered, s.drain_grace_s
from runner_session s
where s.order_number > s.done_order and s.ended_at is null
order by s.id
limit $1;

-- name: confirm_order
update runner_session s set done_order = greatest(s.done_order, least($2, s.order_number)), load = coalesce($3, s.load)
where s.id = $1 and s.ended_at is null
returning s.id;
