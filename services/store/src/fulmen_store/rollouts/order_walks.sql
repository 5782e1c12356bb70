-- Rollouts in the order of one of their figures: ids and values after a place, along the index of the figure. Equal rollouts
-- are newest first, also where values ascend: the index is then probed once for each rollout, for the next older one of the same
-- value, or else for the newest one of the next value. $5: a training run, or null for all. The bound of the
-- value alone makes no other index look better, whatever the statistics say.

-- name: reward_descending
-- A standby may answer.
select q.rollout_id as id, q.reward as value from rollout_end q
where q.project_id = $1 and q.reward <= $2 and (q.reward, q.rollout_id) < ($2, $3)
    and ($5::int is null or q.run_id = $5)
order by q.project_id desc, q.reward desc, q.rollout_id desc limit $4;

-- name: reward_ascending
-- A standby may answer.
with recursive w as (
    select $2::float8 as value, $3::uuid as id
    union all
    select n.value, n.id
    from w
    left join lateral (
        select q.rollout_id as id from rollout_end q
        where q.project_id = $1 and q.reward = w.value and q.rollout_id < w.id and q.reward is not null
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.reward desc, q.rollout_id desc limit 1
    ) s on true
    left join lateral (
        select q.reward as value from rollout_end q
        where s.id is null and q.project_id = $1 and q.reward > w.value and q.reward is not null
            and ($5::int is null or q.run_id = $5)
        order by q.project_id, q.reward, q.rollout_id limit 1
    ) f on true
    left join lateral (
        select q.rollout_id as id from rollout_end q
        where q.project_id = $1 and q.reward = f.value and q.reward is not null
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.reward desc, q.rollout_id desc limit 1
    ) o on true
    cross join lateral (
        select case when s.id is null then f.value else w.value end as value, coalesce(s.id, o.id) as id
    ) n
    where n.id is not null
)
select w.id, w.value from w offset 1 limit $4;

-- name: duration_descending
-- A standby may answer.
select q.rollout_id as id, q.duration_s as value from rollout_end q
where q.project_id = $1 and q.duration_s <= $2 and (q.duration_s, q.rollout_id) < ($2, $3)
    and ($5::int is null or q.run_id = $5)
order by q.project_id desc, q.duration_s desc, q.rollout_id desc limit $4;

-- name: duration_ascending
-- A standby may answer.
with recursive w as (
    select $2::float8 as value, $3::uuid as id
    union all
    select n.value, n.id
    from w
    left join lateral (
        select q.rollout_id as id from rollout_end q
        where q.project_id = $1 and q.duration_s = w.value and q.rollout_id < w.id and q.duration_s is not null
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.duration_s desc, q.rollout_id desc limit 1
    ) s on true
    left join lateral (
        select q.duration_s as value from rollout_end q
        where s.id is null and q.project_id = $1 and q.duration_s > w.value and q.duration_s is not null
            and ($5::int is null or q.run_id = $5)
        order by q.project_id, q.duration_s, q.rollout_id limit 1
    ) f on true
    left join lateral (
        select q.rollout_id as id from rollout_end q
        where q.project_id = $1 and q.duration_s = f.value and q.duration_s is not null
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.duration_s desc, q.rollout_id desc limit 1
    ) o on true
    cross join lateral (
        select case when s.id is null then f.value else w.value end as value, coalesce(s.id, o.id) as id
    ) n
    where n.id is not null
)
select w.id, w.value from w offset 1 limit $4;

-- name: token_count_descending
-- A standby may answer.
select q.rollout_id as id, q.token_count as value from rollout_usage q
where q.project_id = $1 and q.token_count <= $2 and (q.token_count, q.rollout_id) < ($2, $3)
    and ($5::int is null or q.run_id = $5)
order by q.project_id desc, q.token_count desc, q.rollout_id desc limit $4;

-- name: token_count_ascending
-- A standby may answer.
with recursive w as (
    select $2::bigint as value, $3::uuid as id
    union all
    select n.value, n.id
    from w
    left join lateral (
        select q.rollout_id as id from rollout_usage q
        where q.project_id = $1 and q.token_count = w.value and q.rollout_id < w.id
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.token_count desc, q.rollout_id desc limit 1
    ) s on true
    left join lateral (
        select q.token_count as value from rollout_usage q
        where s.id is null and q.project_id = $1 and q.token_count > w.value
            and ($5::int is null or q.run_id = $5)
        order by q.project_id, q.token_count, q.rollout_id limit 1
    ) f on true
    left join lateral (
        select q.rollout_id as id from rollout_usage q
        where q.project_id = $1 and q.token_count = f.value
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.token_count desc, q.rollout_id desc limit 1
    ) o on true
    cross join lateral (
        select case when s.id is null then f.value else w.value end as value, coalesce(s.id, o.id) as id
    ) n
    where n.id is not null
)
select w.id, w.value from w offset 1 limit $4;

-- name: cost_micros_descending
-- A standby may answer.
select q.rollout_id as id, q.cost_micros as value from rollout_usage q
where q.project_id = $1 and q.cost_micros <= $2 and (q.cost_micros, q.rollout_id) < ($2, $3)
    and ($5::int is null or q.run_id = $5)
order by q.project_id desc, q.cost_micros desc, q.rollout_id desc limit $4;

-- name: cost_micros_ascending
-- A standby may answer.
with recursive w as (
    select $2::bigint as value, $3::uuid as id
    union all
    select n.value, n.id
    from w
    left join lateral (
        select q.rollout_id as id from rollout_usage q
        where q.project_id = $1 and q.cost_micros = w.value and q.rollout_id < w.id
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.cost_micros desc, q.rollout_id desc limit 1
    ) s on true
    left join lateral (
        select q.cost_micros as value from rollout_usage q
        where s.id is null and q.project_id = $1 and q.cost_micros > w.value
            and ($5::int is null or q.run_id = $5)
        order by q.project_id, q.cost_micros, q.rollout_id limit 1
    ) f on true
    left join lateral (
        select q.rollout_id as id from rollout_usage q
        where q.project_id = $1 and q.cost_micros = f.value
            and ($5::int is null or q.run_id = $5)
        order by q.project_id desc, q.cost_micros desc, q.rollout_id desc limit 1
    ) o on true
    cross join lateral (
        select case when s.id is null then f.value else w.value end as value, coalesce(s.id, o.id) as id
    ) n
    where n.id is not null
)
select w.id, w.value from w offset 1 limit $4;
