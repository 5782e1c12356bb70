-- Quotas. Running rollouts are counted through the index of leases, under the project's lock; waiting ones are what lives and
-- does not run.

-- name: lock_project_quota
select pg_advisory_xact_lock($1, $2);

-- name: running_room
-- `+ 0` prevents a plan that reads the project's whole backlog through its index instead of the leases.
select
    p.max_running - (select count(*) from item i where i.session is not null and i.project_id + 0 = p.id)::int as room
from project p
where p.id = $1;

-- name: count_queued
select
    p.max_queued,
    case when p.max_queued is null then 0 else greatest(
        coalesce((select sum(l.live) from live_count l where l.project_id = p.id), 0)
            - (select count(*) from item i where i.session is not null and i.project_id + 0 = p.id),
        0
    ) end::bigint as queued
from project p
where p.id = $1;
