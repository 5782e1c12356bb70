-- Queue statistics and durations of attempts. Counts are kept (live_count): no statement reads the backlog.

-- name: count_by_priority
-- What waits is what lives and neither runs nor is delayed. Of delayed rollouts, so many are counted at most; the oldest one is
-- looked for among the first of each priority.
with c as (
    select s.sort_priority, sum(s.live)::bigint as live, sum(s.running)::bigint as running, sum(s.delayed)::bigint as delayed
    from (
        select l.sort_priority, l.live, 0 as running, 0 as delayed from live_count l
        where l.project_id = $1 and ($2::int is null or l.run_id = $2)
        union all
        select i.sort_priority, 0, 1, 0 from item i
        where i.session is not null and i.project_id + 0 = $1 and ($2::int is null or i.run_id = $2)
        union all
        select w.sort_priority, 0, 0, 1 from (
            select i.sort_priority from item i
            where i.delayed and i.session is null and i.run_at > now()
                and i.project_id + 0 = $1 and ($2::int is null or i.run_id = $2)
            order by i.run_at limit 100000
        ) w
    ) s
    group by s.sort_priority
)
select
    c.sort_priority, greatest(c.live - c.running - c.delayed, 0) as queued, c.running, c.delayed,
    (
        select extract(epoch from now() - min(f.run_at))::float8 from (
            select q.run_at, q.run_id from item q
            where q.project_id = $1 and q.sort_priority = c.sort_priority and q.session is null
            order by q.id limit 1000
        ) f
        where f.run_at <= now() and ($2::int is null or f.run_id = $2)
    ) as oldest_age_s
from c
where c.live > 0
order by c.sort_priority;

-- name: queue_terms
select
    p.name, p.weight, p.max_running, p.max_queued, p.rules, p.paused_at, p.pause_reason,
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
-- Rollouts of paused agents and of paused queues need no runner.
select
    p.name as project, p.max_running, p.rules, i.labels, i.task_type, i.running,
    case when p.paused_at is null then i.queued else 0 end as queued
from (
    select
        s.project_id, s.labels, s.task_type, sum(s.running)::bigint as running,
        greatest(coalesce(sum(s.live - s.running - s.delayed) filter (where not s.paused), 0), 0)::bigint as queued
    from (
        select
            s.project_id, s.labels, s.task_type, s.live, s.running, s.delayed,
            exists (select 1 from lost_runner l where l.agent = s.agent and l.paused_at is not null) as paused
        from (
            select l.project_id, l.labels, l.task_type, l.agent, l.live, 0 as running, 0 as delayed from live_count l
            union all
            select q.project_id, q.labels, q.task_type, q.agent, 0, 1, 0 from item q where q.session is not null
            union all
            select w.project_id, w.labels, w.task_type, w.agent, 0, 0, 1 from (
                select q.project_id, q.labels, q.task_type, q.agent from item q
                where q.delayed and q.session is null and q.run_at > now()
                order by q.run_at limit 100000
            ) w
        ) s
    ) s
    group by s.project_id, s.labels, s.task_type
) i
join project p on p.id = i.project_id
where i.queued > 0 or i.running > 0;

-- name: fold_counts
-- Rows that another replica folds are left to it. Only if there are more new rows than folded ones: each is then rewritten
-- twice on average, however many kinds there are.
with d as (
    delete from live_count c
    where (select count(*) > 2 * count(*) filter (where q.folded) from live_count q)
    returning c.project_id, c.run_id, c.sort_priority, c.labels, c.task_type, c.agent, c.live
)
insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live, folded)
select d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent, sum(d.live), true from d
group by d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent
having sum(d.live) <> 0;

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
-- The task types of a deleted project may be gone.
insert into task_duration as old (task_type, bucket, count)
select n.id, x.bucket, x.count
from unnest($1::int[], $2::smallint[], $3::bigint[]) as x (task_type, bucket, count)
cross join lateral (select q.id from interned_name q where q.id = x.task_type limit 1 for key share) n
order by x.task_type, x.bucket
on conflict (task_type, bucket) do update set count = old.count + excluded.count;

-- name: read_durations
select d.task_type, d.bucket, d.count
from unnest($1::int[]) as x (task_type)
cross join lateral (
    select q.task_type, q.bucket, q.count from task_duration q where q.task_type = x.task_type
) d;
