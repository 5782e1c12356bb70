-- columns: shown
--   id bigint, name text, cron text, time_zone text, overlap_policy smallint, missed_policy smallint, rollout_count int,
--   created_at timestamptz, paused_at timestamptz, pause_reason text, next_due timestamptz

-- columns: run
--   due_at timestamptz, claimed_at timestamptz, state smallint, rollout_ids uuid[], failure_reason text, failure_message text

-- name: lock_schedules
-- Waits for other additions to the project, so that it never has more than the maximum.
select now() as now from project p where p.id = $1 for no key update;

-- name: create_schedule
insert into schedule (
    project_id, name, spec, cron, time_zone, overlap_policy, missed_policy, rollout_count, next_due
)
select $1, $2, $3, $4, $5, $6, $7, $8, $9
where (select count(*) from schedule q where q.project_id = $1) < $10::int
on conflict (project_id, name) do nothing
returning {shown};

-- name: get_schedule
select {s.shown}, s.spec, now() as now from schedule s where s.project_id = $1 and s.name = $2;

-- name: list_schedules
-- With the latest run of each.
select {s.shown}, {r.run}
from schedule s left join lateral (
    select q.* from schedule_run q where q.schedule_id = s.id order by q.due_at desc limit 1
) r on true
where s.project_id = $1 order by s.name;

-- name: list_schedule_runs
select {r.run} from schedule_run r where r.schedule_id = $1 order by r.due_at desc limit $2;

-- name: pause_schedule
update schedule s set paused_at = coalesce(s.paused_at, now()), pause_reason = $3, next_due = null
where s.project_id = $1 and s.name = $2
returning {s.shown};

-- name: resume_schedule
-- Unless it was resumed meanwhile: then its next time stays.
update schedule s set paused_at = null, pause_reason = '', next_due = $3
where s.project_id = $1 and s.name = $2 and s.paused_at is not null
returning {s.shown};

-- name: delete_schedule
delete from schedule s where s.project_id = $1 and s.name = $2 returning s.id;

-- name: due_schedules
select s.id, s.cron, s.time_zone, s.next_due, now() as now
from schedule s where s.next_due <= now() order by s.next_due limit $1;

-- name: hold_due_schedule
-- Of the replicas that see it due, one gets it.
select s.project_id, s.rollout_count, s.overlap_policy, s.missed_policy from schedule s
where s.id = $1 and s.next_due = $2 for no key update skip locked;

-- name: schedule_is_running
-- Whether rollouts of the latest run that created some are not final.
select exists (
    select from schedule_run r
    where r.schedule_id = $1
        and r.due_at = (
            select q.due_at from schedule_run q
            where q.schedule_id = $1 and q.state in (1, 2) order by q.due_at desc limit 1
        )
        and (r.state = 1 or exists (select from item i where i.id = any (r.rollout_ids)))
) as is_running;

-- name: start_schedule_run
insert into schedule_run (schedule_id, due_at, state, rollout_ids, retry_at)
values ($1, $2, $3::smallint, $4::uuid[], case when $3::smallint = 1 then now() + make_interval(secs => $5) end)
on conflict do nothing
returning schedule_id;

-- name: set_next_due
update schedule s set next_due = $2 where s.id = $1 returning s.id;

-- name: remove_old_schedule_runs
-- The latest run that created rollouts stays, for the next one looks whether they still run.
delete from schedule_run r where r.ctid = any (array(
    select q.ctid from schedule_run q
    where q.schedule_id = $1
        and q.due_at is distinct from (
            select max(c.due_at) from schedule_run c where c.schedule_id = $1 and c.state in (1, 2)
        )
    order by q.due_at desc offset $2 limit 100
)) returning 1;

-- name: continue_schedule_runs
-- Those whose replica has not reported in time.
update schedule_run r set retry_at = now() + make_interval(secs => $1)
where r.ctid = any (array(
    select q.ctid from schedule_run q where q.state = 1 and q.retry_at <= now() order by q.retry_at limit $2
    for update skip locked
))
returning r.schedule_id, r.due_at, r.rollout_ids;

-- name: schedule_to_run
select p.name as project, s.name, s.spec
from schedule s join project p on p.id = s.project_id where s.id = $1 and p.deleted_at is null;

-- name: end_schedule_run
update schedule_run r set
    state = $3::smallint, retry_at = null, failure_reason = $4, failure_message = $5,
    rollout_ids = case when $3::smallint = 2 then r.rollout_ids else '{}' end
where r.schedule_id = $1 and r.due_at = $2 and r.state = 1
returning extract(epoch from now() - r.due_at)::float8 as delay_s;
