-- Lists of rollouts. Each walks one index by id and looks at no more than one window of rows: the rows between two ids,
-- the lower of which the statement `..._window` found. `true /* filter */` is where a caller's filter goes, `/* order */`
-- stands behind the order that a caller's replaces (fulmen_store.rollouts.lists). Rows are compared and ordered by all
-- columns of the index to walk: no other can do that, whatever the statistics say. Statements around a list have it in
-- place of the one before `/* list */`.

-- name: project_window
-- A standby may answer.
select r.id from rollout r
where (r.project_id, r.id) < ($1, $2) and (r.project_id, r.id) >= ($1, $3)
order by r.project_id desc, r.id desc offset $4 limit 1;

-- name: run_window
-- A standby may answer.
select r.id from rollout r
where (r.project_id, r.run_id, r.id) < ($1, $5, $2) and (r.project_id, r.run_id, r.id) >= ($1, $5, $3)
order by r.project_id desc, r.run_id desc, r.id desc offset $4 limit 1;

-- name: dead_window
-- A standby may answer.
select q.rollout_id as id from rollout_end q
where q.project_id = $1 and q.state = 5 and q.rollout_id < $2 and q.rollout_id >= $3
order by q.rollout_id desc offset $4 limit 1;

-- name: list_project_rollouts
-- A standby may answer.
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, null::text as host, i.delayed, i.run_at,
    r.sort_priority, e.state as end_state, e.failure_kind, e.ended_at, e.reward, e.duration_s, e.failure_message,
    u.prompt_token_count, u.completion_token_count, u.cost_micros, r.mode, r.task_type, r.agent, r.run_id,
    (select count(*) from attempt a where a.rollout_id = r.id) as ended_attempts
from rollout r
left join lateral (
    select q.epoch, q.session, q.leased_at, q.run_at > now() as delayed, q.run_at from item q where q.id = r.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at, q.reward, q.duration_s, q.failure_message
    from rollout_end q where q.rollout_id = r.id limit 1
) e on true
left join lateral (
    select q.prompt_token_count, q.completion_token_count, q.token_count, q.cost_micros
    from rollout_usage q where q.rollout_id = r.id limit 1
) u on true
where (r.project_id, r.id) < ($1, $2) and (r.project_id, r.id) >= ($1, $3) and true /* filter */
order by r.project_id desc, r.id desc /* order */
limit $4;

-- name: list_run_rollouts
-- A standby may answer.
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, null::text as host, i.delayed, i.run_at,
    r.sort_priority, e.state as end_state, e.failure_kind, e.ended_at, e.reward, e.duration_s, e.failure_message,
    u.prompt_token_count, u.completion_token_count, u.cost_micros, r.mode, r.task_type, r.agent, r.run_id,
    (select count(*) from attempt a where a.rollout_id = r.id) as ended_attempts
from rollout r
left join lateral (
    select q.epoch, q.session, q.leased_at, q.run_at > now() as delayed, q.run_at from item q where q.id = r.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at, q.reward, q.duration_s, q.failure_message
    from rollout_end q where q.rollout_id = r.id limit 1
) e on true
left join lateral (
    select q.prompt_token_count, q.completion_token_count, q.token_count, q.cost_micros
    from rollout_usage q where q.rollout_id = r.id limit 1
) u on true
where (r.project_id, r.run_id, r.id) < ($1, $5, $2) and (r.project_id, r.run_id, r.id) >= ($1, $5, $3)
    and true /* filter */
order by r.project_id desc, r.run_id desc, r.id desc /* order */
limit $4;

-- name: list_rollouts_of_ids
-- In the order of the ids, of $1 those of a project, and of a training run with one. A standby may answer.
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, null::text as host, i.delayed, i.run_at,
    r.sort_priority, e.state as end_state, e.failure_kind, e.ended_at, e.reward, e.duration_s, e.failure_message,
    u.prompt_token_count, u.completion_token_count, u.cost_micros, r.mode, r.task_type, r.agent, r.run_id,
    (select count(*) from attempt a where a.rollout_id = r.id) as ended_attempts
from unnest($1::uuid[]) with ordinality as x (id, n)
cross join lateral (
    select q.id, q.project_id, q.run_id, q.request, q.created_at, q.sort_priority, q.mode, q.group_id, q.task_type, q.agent
    from rollout q where q.id = x.id and q.project_id = $2 and ($4::int is null or q.run_id = $4) limit 1
) r
left join lateral (
    select q.epoch, q.session, q.leased_at, q.run_at > now() as delayed, q.run_at from item q where q.id = x.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at, q.reward, q.duration_s, q.failure_message
    from rollout_end q where q.rollout_id = x.id limit 1
) e on true
left join lateral (
    select q.prompt_token_count, q.completion_token_count, q.token_count, q.cost_micros
    from rollout_usage q where q.rollout_id = x.id limit 1
) u on true
where true /* filter */
order by x.n
limit $3;

-- name: list_dead_rollouts
-- A standby may answer.
select
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, null::text as host, i.delayed, i.run_at,
    r.sort_priority, e.state as end_state, e.failure_kind, e.ended_at, e.reward, e.duration_s, e.failure_message,
    u.prompt_token_count, u.completion_token_count, u.cost_micros, r.mode, r.task_type, r.agent, r.run_id,
    (select count(*) from attempt a where a.rollout_id = r.id) as ended_attempts
from rollout_end e
cross join lateral (
    select q.id, q.project_id, q.run_id, q.request, q.created_at, q.sort_priority, q.mode, q.group_id, q.task_type, q.agent
    from rollout q where q.id = e.rollout_id limit 1
) r
cross join lateral (
    select null::int as epoch, null::uuid as session, null::timestamptz as leased_at, false as delayed, null::timestamptz as run_at
) i
left join lateral (
    select q.prompt_token_count, q.completion_token_count, q.token_count, q.cost_micros
    from rollout_usage q where q.rollout_id = r.id limit 1
) u on true
where e.project_id = $1 and e.state = 5 and e.rollout_id < $2 and e.rollout_id >= $3
    and ($5::int is null or e.run_id = $5) and true /* filter */
order by e.rollout_id desc /* order */
limit $4;

-- name: count_listed
select
    coalesce(s.end_state, case when s.session is not null then 2 when s.delayed and s.epoch > 0 then 3 else 1 end) as state,
    coalesce(s.failure_kind, 0) as failure_kind, count(*) as count
from (
    select null::int as end_state, null::uuid as session, false as delayed, 0 as epoch, 0 as failure_kind /* list */
) s
group by 1, 2;

-- name: ids_listed
select s.id from (
    select null::uuid as id /* list */
) s
order by s.id desc;

-- name: facets_listed
-- Numbers of rollouts by each of their traits alone: by the trait whose bit of `others` is 0, the first one being the highest.
select
    grouping(s.state, s.failure_kind, s.mode, s.task_type, s.agent, s.run_id, s.reward_place)::int as others, s.state,
    s.failure_kind, s.mode, s.task_type, s.agent, s.run_id, s.reward_place, count(*) as count
from (
    select
        coalesce(s.end_state, case when s.session is not null then 2 when s.delayed and s.epoch > 0 then 3 else 1 end) as state,
        coalesce(s.failure_kind, 0) as failure_kind, s.mode, s.task_type, s.agent, s.run_id,
        -- Below 0, 0, above 0, from 0.25, 0.5 and 0.75 on, 1, above 1 (fulmen_store.rollouts.facets).
        width_bucket(s.reward, array[0, 5e-324, 0.25, 0.5, 0.75, 1, 1.0000000000000002]::float8[]) as reward_place
    from (
        select null::int as end_state, null::uuid as session, false as delayed, 0 as epoch, 0 as failure_kind, 0 as mode, 0 as task_type, 0 as agent, 0 as run_id, null::float8 as reward /* list */
    ) s
) s
group by grouping sets ((s.state), (s.failure_kind), (s.mode), (s.task_type), (s.agent), (s.run_id), (s.reward_place));

-- name: map_facets_listed
-- Numbers of rollouts by the entries of their maps: metadata (15), required labels (13) and resource versions (10). First
-- their number.
with s as materialized (
    select null::bytea as request /* list */
)
select 0 as field, ''::bytea as key, ''::bytea as value, count(*) as count from s
union all
select f.field, k.key, v.value, count(*) as count
from s
cross join (values (10), (13), (15)) as f (field)
cross join lateral message_fields(s.request, f.field) as e (entry)
cross join lateral message_fields(e.entry, 1) as k (key)
cross join lateral message_fields(e.entry, 2) as v (value)
group by f.field, k.key, v.value;

-- name: names_of_numbers
-- Of interned names and of training runs.
select n.id, n.name, false as is_run from interned_name n where n.id = any ($1::int[])
union all
select t.id, t.name, true as is_run from training_run t where t.id = any ($2::int[]);
