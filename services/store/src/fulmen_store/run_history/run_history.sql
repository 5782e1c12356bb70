-- The history of training runs. Of a repeated step the last measurement counts; steps that a later rollback undid do not.

-- name: append_run_events
insert into run_event (
    project_id, run, sequence, happened_at, kind, step, metrics, numbers, reward_values, reward_counts, reward_bin, severity,
    message
)
select $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13
on conflict do nothing;

-- name: last_run_event
select e.sequence from run_event e where e.project_id = $1 and e.run = $2 order by e.sequence desc limit 1;

-- name: run_history_summary
-- A standby may answer.
select
    (
        select e.happened_at from run_event e where e.project_id = $1 and e.run = $2
        order by e.project_id, e.run, e.sequence limit 1
    ) as first_at,
    (
        select e.sequence from run_event e where e.project_id = $1 and e.run = $2
        order by e.project_id desc, e.run desc, e.sequence desc limit 1
    ) as last_sequence,
    array(
        select distinct n.name from (
            (
                select e.metrics from run_event e where e.project_id = $1 and e.run = $2
                order by e.project_id, e.run, e.sequence limit 100
            )
            union all
            (
                select e.metrics from run_event e where e.project_id = $1 and e.run = $2
                order by e.project_id desc, e.run desc, e.sequence desc limit 100
            )
        ) m cross join lateral unnest(m.metrics) as n (name)
        order by n.name
    ) as metric_names;

-- name: run_curves
-- $3: metrics, $4: axis, $5: points. A curve with more is cut into ($5 - 1) / 2 pieces, of which the least and the greatest
-- remain, and its last point, unless there is room for two alone. A standby may answer.
with e as (
    select q.sequence, q.step, q.happened_at, q.metrics, q.numbers from run_event q
    where q.project_id = $1 and q.run = $2 and q.kind = 1
        and not exists (
            select 1 from run_event b
            where b.project_id = $1 and b.run = $2 and b.kind = 3 and b.sequence > q.sequence and q.step > b.step
        )
), tokens as (
    select t.step, sum(t.tokens) over (order by t.step) as trained
    from (
        select distinct on (e.step) e.step, e.numbers[array_position(e.metrics, 'tokens')] as tokens from e
        where $4 = 3 and 'tokens' = any (e.metrics)
        order by e.step, e.sequence desc
    ) t
), measured as (
    select distinct on (m.name, e.step)
        m.name, e.step, e.numbers[array_position(e.metrics, m.name)] as value,
        case $4::int
            when 1 then e.step::float8
            when 2 then extract(epoch from e.happened_at - $6::timestamptz)::float8
            else (
                select k.trained from tokens k where k.step <= e.step order by k.step desc limit 1
            )
        end as position
    from e cross join unnest($3::text[]) as m (name)
    where m.name = any (e.metrics)
    order by m.name, e.step, e.sequence desc
), finite as (
    select v.name, v.step, v.value, v.position,
        count(*) over (partition by v.name) as measured,
        row_number() over (partition by v.name order by v.step) - 1 as place
    from measured v
    where v.value not in ('NaN', 'Infinity', '-Infinity') and v.position is not null
), pieces as (
    select f.*,
        case
            when f.measured <= $5 then f.place
            when $5 > 2 and f.place = f.measured - 1 then f.measured
            else f.place * greatest(($5::int - 1) / 2, 1) / f.measured
        end as piece
    from finite f
), ends as (
    select distinct on (p.name, p.piece) p.name, p.step, p.position, p.value, p.measured from pieces p
    order by p.name, p.piece, p.value, p.step
), tops as (
    select distinct on (p.name, p.piece) p.name, p.step, p.position, p.value, p.measured from pieces p
    order by p.name, p.piece, p.value desc, p.step
), points as (
    select * from ends union select * from tops
), counted as (
    select v.name, count(*) filter (where v.value in ('NaN', 'Infinity', '-Infinity')) as not_finite
    from measured v group by v.name
)
select
    c.name, c.not_finite, coalesce(max(p.measured), 0) as measured,
    coalesce(array_agg(p.position order by p.step) filter (where p.step is not null), '{}') as positions,
    coalesce(array_agg(p.value order by p.step) filter (where p.step is not null), '{}') as values
from counted c
left join points p on p.name = c.name
group by c.name, c.not_finite;

-- name: reward_distributions
-- Of $3 steps at most. A standby may answer.
with e as (
    select distinct on (q.step) q.step, q.reward_values, q.reward_counts, q.reward_bin from run_event q
    where q.project_id = $1 and q.run = $2 and q.kind = 1 and q.reward_values is not null
        and not exists (
            select 1 from run_event b
            where b.project_id = $1 and b.run = $2 and b.kind = 3 and b.sequence > q.sequence and q.step > b.step
        )
    order by q.step, q.sequence desc
), n as (
    select e.*, row_number() over (order by e.step desc) - 1 as place, count(*) over () as total from e
)
select n.step, n.reward_values, n.reward_counts, n.reward_bin from n
where n.place * $3::bigint % greatest(n.total, $3::bigint) < $3::bigint
order by n.step;

-- name: run_notices
-- A standby may answer.
select
    e.sequence, e.happened_at, e.severity, e.message,
    coalesce((
        select s.step from run_event s
        where s.project_id = $1 and s.run = $2 and s.sequence < e.sequence and s.kind = 1
        order by s.project_id desc, s.run desc, s.sequence desc limit 1
    ), 0) as step
from run_event e
where e.project_id = $1 and e.run = $2 and e.kind = 2 and e.sequence < $3
order by e.project_id desc, e.run desc, e.sequence desc
limit $4;
