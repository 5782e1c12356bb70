-- Changes of live rollouts. The item is locked before the request is read, so that changes of one rollout add up.

-- name: hold_item
select q.project_id, q.sort_priority from item q where q.id = $1 limit 1 for update;

-- name: current_request
select q.request from rollout q where q.id = $1 limit 1;

-- name: change_rollout
with o as (
    select q.project_id, q.run_id, q.sort_priority, q.labels, q.task_type, q.agent from item q where q.id = $1 limit 1
), c as (
    insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live)
    select o.project_id, o.run_id, x.sort_priority, o.labels, o.task_type, o.agent, x.live
    from o cross join lateral (values (o.sort_priority, -1), ($2::smallint, 1)) as x (sort_priority, live)
    where o.sort_priority <> $2::smallint
), i as (
    update item q set
        sort_priority = $2, deadline = $3, request_bytes = octet_length($4::bytea), changed = pg_current_xact_id()
    where q.id = $1
)
update rollout q set sort_priority = $2, request = $4, original = coalesce(q.original, q.request) where q.id = $1;

-- name: reorder_project
update project p set order_revision = p.order_revision + 1 where p.id = $1;

-- name: pause_queue
update project p set paused_at = coalesce(p.paused_at, now()), pause_reason = $2 where p.id = $1
returning p.paused_at;

-- name: resume_queue
update project p set paused_at = null, pause_reason = ''
from (select q.id, q.paused_at from project q where q.id = $1 for no key update) k
where p.id = k.id
returning k.paused_at is not null as was_paused;
