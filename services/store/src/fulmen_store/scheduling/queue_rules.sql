-- Queue statistics and durations of attempts.

-- name: count_by_priority
select
    i.sort_priority,
    count(*) filter (where i.session is null and i.run_at <= now()) as queued,
    count(*) filter (where i.session is not null) as running,
    count(*) filter (where i.session is null and i.run_at > now()) as delayed,
    extract(epoch from now() - min(i.run_at) filter (where i.session is null and i.run_at <= now()))::float8
        as oldest_age_s
from item i
where i.project_id = $1 and ($2::int is null or i.run_id = $2)
group by i.sort_priority
order by i.sort_priority;

-- name: queue_terms
select
    p.name, p.weight, p.max_running, p.max_queued, p.rules,
    (
        select count(*) from runner_session s
        where s.ended_at is null and s.lease_until > now() and s.project in (p.name, 'projects/*')
    ) as runners
from project p
where p.id = $1;

-- name: paused_agents
select n.name as agent, l.paused_at, l.rollouts
from lost_runner l join interned_name n on n.id = l.agent
where l.project_id = $1 and l.paused_at is not null
order by l.paused_at desc, n.name
limit $2;

-- name: count_demand
-- Rollouts of paused agents need no runner.
select p.name as project, p.max_running, p.rules, i.labels, i.task_type, i.queued, i.running
from (
    select
        q.project_id, q.labels, q.task_type,
        count(*) filter (where q.session is null and q.run_at <= now()) as queued,
        count(*) filter (where q.session is not null) as running
    from item q
    where q.session is not null or q.agent is null
        or not exists (select 1 from lost_runner l where l.agent = q.agent and l.paused_at is not null)
    group by q.project_id, q.labels, q.task_type
) i
join project p on p.id = i.project_id;

-- name: frequent_task_types
select t.name, t.total, d.buckets, d.counts
from (
    select n.id, n.name, s.total
    from (
        select q.id, q.name from interned_name q where q.project_id = $1 and q.kind = 1 order by q.id desc limit $2
    ) n
    cross join lateral (
        select sum(q.count)::bigint as total from task_duration q where q.task_type = n.id
    ) s
    where s.total is not null
    order by s.total desc, n.name
    limit $3
) t
cross join lateral (
    select array_agg(q.bucket order by q.bucket) as buckets, array_agg(q.count order by q.bucket) as counts
    from task_duration q where q.task_type = t.id
) d
order by t.total desc, t.name;

-- name: add_durations
insert into task_duration as old (task_type, bucket, count)
select x.task_type, x.bucket, x.count
from unnest($1::int[], $2::smallint[], $3::bigint[]) as x (task_type, bucket, count)
order by x.task_type, x.bucket
on conflict (task_type, bucket) do update set count = old.count + excluded.count;

-- name: read_durations
select d.task_type, d.bucket, d.count
from unnest($1::int[]) as x (task_type)
cross join lateral (
    select q.task_type, q.bucket, q.count from task_duration q where q.task_type = x.task_type
) d;
