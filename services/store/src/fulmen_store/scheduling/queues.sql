-- Queues of projects, and of labels. Counts are kept (live_count): no statement reads the backlog.

-- name: list_queues
select
    p.name, p.weight, p.max_running, p.max_queued, p.rules, p.paused_at, p.pause_reason, coalesce(r.running, 0) as running,
    greatest(coalesce(l.live, 0) - coalesce(r.running, 0) - coalesce(d.delayed, 0), 0) as queued
from (
    select q.* from project q
    where q.name > $1 and ($2::text is null or q.name = $2) and q.deleted_at is null
    order by q.name limit $3
) p
left join (select c.project_id, sum(c.live)::bigint as live from live_count c group by c.project_id) l on l.project_id = p.id
left join (
    select i.project_id, count(*) as running from item i where i.session is not null group by i.project_id
) r on r.project_id = p.id
left join (
    select w.project_id, count(*) as delayed from (
        select q.project_id from item q
        where q.delayed and q.session is null and q.run_at > now()
        order by q.run_at limit 100000
    ) w
    group by w.project_id
) d on d.project_id = p.id
order by p.name;

-- name: count_by_labels
-- As count_by_priority, by the labels that rollouts require.
select c.labels, greatest(c.live - c.running - c.delayed, 0) as queued, c.running
from (
    select
        s.labels, sum(s.live)::bigint as live, sum(s.running)::bigint as running, sum(s.delayed)::bigint as delayed
    from (
        select l.labels, l.live, 0 as running, 0 as delayed from live_count l
        where l.project_id = $1 and ($2::int is null or l.run_id = $2)
        union all
        select i.labels, 0, 1, 0 from item i
        where i.session is not null and i.project_id + 0 = $1 and ($2::int is null or i.run_id = $2)
        union all
        select w.labels, 0, 0, 1 from (
            select i.labels from item i
            where i.delayed and i.session is null and i.run_at > now()
                and i.project_id + 0 = $1 and ($2::int is null or i.run_id = $2)
            order by i.run_at limit 100000
        ) w
    ) s
    group by s.labels
) c
where c.live > 0
order by queued desc, c.labels
limit $3;
