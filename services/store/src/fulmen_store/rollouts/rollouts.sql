-- Three rules keep every plan a point lookup whatever the statistics say: rows are found by `cross join lateral (...

-- name: ensure_training_run
insert into training_run (project_id, name) values ($1, $2)
on conflict (project_id, name) do update set used_at = now()
returning id;

-- name: ensure_name
insert into interned_name (project_id, kind, name) values ($1, $2, $3)
on conflict (project_id, kind, name) do update set used_at = now()
returning id;

-- name: find_training_run
update training_run t set used_at = now() where t.project_id = $1 and t.name = $2 returning t.id;

-- The columns of a new rollout, in order. Columns of live rows alone are listed under `item`; a scheduling field is one.
-- columns: rollout
--   id uuid, project_id int, run_id int, sort_priority smallint, mode smallint, task_type int, agent int, request bytea
-- columns: item
--   group_key uuid, group_size smallint, max_attempts smallint, retry_mask int, backoff_ms int, timeout_ms int,
--   deadline timestamptz, hedged boolean, request_bytes int
-- columns: derived
--   group_id text, label_text text, not_before timestamptz, matched uuid

-- name: create_rollouts
-- matched: the waiting runner session that gets the first lease, in the commit that creates the rollout. Rows are written in
-- the order of their keys, whatever the caller's is: names that two callers create at once are waited for.
with n as (
    select {x.rollout+item+derived}
    from unnest({rollout+item+derived[4 text]}) as x ({rollout+item+derived})
), r as (
    insert into rollout ({rollout}, group_id)
    select {n.rollout}, nullif(n.group_id, '') from n order by n.id
), g as (
    insert into rollout_group as old (group_key, size, created, project_id)
    select n.group_key, max(n.group_size), count(*), min(n.project_id) from n where n.group_key is not null
    group by n.group_key
    order by n.group_key
    on conflict (group_key) do update set
        created = old.created + excluded.created,
        touched_at = excluded.touched_at,
        size = case when old.size = excluded.size then old.size end
), c as (
    insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live)
    select n.project_id, n.run_id, n.sort_priority, string_to_array(n.label_text, e'\x1f'), n.task_type, n.agent,
        count(*)
    from n
    group by n.project_id, n.run_id, n.sort_priority, n.label_text, n.task_type, n.agent
), w as (
    insert into resource_use (resource_id, version, rollout_id)
    select x.resource_id, x.version, x.rollout_id
    from unnest($1::int[], $2::bigint[], $3::uuid[]) as x (resource_id, version, rollout_id)
    order by x.resource_id, x.version, x.rollout_id
    on conflict do nothing
)
insert into item (
    id, project_id, run_id, sort_priority, task_type, agent, {item}, labels, run_at, delayed, session, leased_at, epoch
)
select
    n.id, n.project_id, n.run_id, n.sort_priority, n.task_type, n.agent, {n.item},
    string_to_array(n.label_text, e'\x1f'), coalesce(n.not_before, now()),
    coalesce(n.not_before > now(), false), n.matched,
    case when n.matched is not null then now() end, (n.matched is not null)::int
from n
order by n.id
returning id;

-- name: stored_requests
-- As they were asked for, by which a repeated creation is recognized.
select r.id, r.project_id, r.request
from unnest($1::uuid[]) as x (id)
cross join lateral (
    select q.id, q.project_id, coalesce(q.original, q.request) as request from rollout q where q.id = x.id limit 1
) r;

-- name: get_rollouts
-- Ends behind the one whose request makes all of them have $4 bytes or more. Attempts are the newest 16.
select s.* from (
select
    x.n, coalesce(sum(octet_length(r.request)) over (order by x.n rows between unbounded preceding and 1 preceding), 0)
        as bytes_before,
    r.id, r.project_id, r.request, r.created_at, i.epoch, i.session, i.leased_at, i.host, i.delayed, i.run_at, i.progress,
    i.timeout_ms, i.hedge_epoch, i.hedge_session, i.hedge_leased_at, i.hedge_host, i.hedge_progress, r.sort_priority,
    e.state as end_state, e.failure_kind, e.ended_at, e.reward, e.duration_s, e.failure_message,
    u.prompt_token_count, u.completion_token_count, u.cost_micros,
    array(
        select (
            q.number, q.state, q.failure_kind, q.rollout_state, q.session, q.started_at, q.ended_at, q.report,
            (select s.host from runner_session s where s.id = q.session)
        )
        from attempt q where $3::boolean and q.rollout_id = x.id order by q.number desc limit 16
    ) as attempts,
    (select count(*) from attempt q where $3::boolean and q.rollout_id = x.id) as ended_attempts
from unnest($1::uuid[]) with ordinality as x (id, n)
cross join lateral (
    select q.id, q.project_id, q.request, q.created_at, q.sort_priority from rollout q where q.id = x.id limit 1
) r
left join lateral (
    select
        q.epoch, q.session, q.leased_at, q.run_at > now() as delayed, q.run_at, q.progress,
        (select s.host from runner_session s where s.id = q.session) as host,
        least(q.timeout_ms, case when q.bound_epoch = q.epoch then q.bound_ms end) as timeout_ms,
        q.hedge_epoch, q.hedge_session, q.hedge_leased_at, q.hedge_progress,
        (select s.host from runner_session s where s.id = q.hedge_session) as hedge_host
    from item q where q.id = x.id limit 1
) i on true
left join lateral (
    select q.state, q.failure_kind, q.ended_at, q.reward, q.duration_s, q.failure_message
    from rollout_end q where q.rollout_id = x.id limit 1
) e on true
left join lateral (
    select q.prompt_token_count, q.completion_token_count, q.token_count, q.cost_micros
    from rollout_usage q where $2::boolean and q.rollout_id = x.id limit 1
) u on true
) s
where s.bytes_before < $4::bigint
order by s.n;

-- name: get_attempts
-- The newest 16 of each rollout. Ends behind the one whose report makes all of them have $2 bytes or more.
select
    s.number, s.state, s.failure_kind, s.rollout_state, s.session, s.started_at, s.ended_at, s.report, s.host,
    s.rollout_id
from (
    select
        x.n, a.*,
        coalesce(
            sum(octet_length(a.report)) over (order by x.n, a.number rows between unbounded preceding and 1 preceding), 0
        ) as bytes_before
    from unnest($1::uuid[]) with ordinality as x (id, n)
    cross join lateral (
        select
            q.rollout_id, q.number, q.state, q.failure_kind, q.rollout_state, q.session, q.started_at, q.ended_at,
            q.report, (select s.host from runner_session s where s.id = q.session) as host
        from attempt q where q.rollout_id = x.id order by q.number desc limit 16
    ) a
) s
where s.bytes_before < $2::bigint
order by s.n, s.number;

-- name: list_attempts
-- A standby may answer.
select
    q.number, q.state, q.failure_kind, q.rollout_state, q.session, q.started_at, q.ended_at, q.report,
    (select s.host from runner_session s where s.id = q.session) as host
from attempt q where q.rollout_id = $1 and q.number > $2 order by q.number limit $3;

-- name: get_printed
-- Of the newest 16 attempts. A standby may answer.
select s.number, s.printed
from (
    select q.number, q.printed from attempt q where q.rollout_id = $1 order by q.number desc limit 16
) s
where s.printed is not null;

-- name: live_rollouts
select i.sort_priority, i.id from item i
where i.project_id = $1 and (i.sort_priority, i.id) > ($2, $3) and not i.cancel_requested
order by i.sort_priority, i.id limit $4;

-- name: live_rollouts_of_run
-- Walks the run's rollouts, not the project's backlog; compared and ordered by all columns of the index to walk.
select r.id, i.id is not null as is_live
from (
    select q.project_id, q.run_id, q.id from rollout q
    where (q.project_id, q.run_id, q.id) < ($1, $2, $3) and (q.project_id, q.run_id) >= ($1, $2)
    order by q.project_id desc, q.run_id desc, q.id desc limit $4
) r
left join lateral (
    select q.id from item q where q.id = r.id and not q.cancel_requested limit 1
) i on true
order by r.id desc;

-- name: cancel_rollouts
with k as (
    select i.c, i.session
    from (select y.id from unnest($1::uuid[]) as y (id) order by y.id) x
    cross join lateral (select q.ctid as c, q.session from item q where q.id = x.id limit 1 for update) i
), d as (
    delete from item i using k where i.ctid = k.c and k.session is null
    returning
        i.id, i.project_id, i.run_id, i.group_key, i.group_size, i.sort_priority, i.labels, i.task_type, i.agent
), c as (
    insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live)
    select d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent, -count(*) from d
    group by d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent
), e as (
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind)
    select d.id, d.project_id, d.run_id, d.group_key, d.group_size, 6, 6 from d
), u as (
    update item i set
        cancel_requested = true, cancel_by = coalesce(i.cancel_by, now() + $2::float8 * interval '1 second')
    from k where i.ctid = k.c and k.session is not null
    returning i.id, i.session, i.epoch, i.project_id
)
select d.id, null::uuid as session, 0 as epoch, d.project_id from d
union all
select u.id, u.session, u.epoch, u.project_id from u;

-- name: log_request
insert into request_log (project_id, method, request_id, result) values ($1, $2, $3, $4)
on conflict (project_id, method, request_id) do nothing
returning result;

-- name: logged_request
select result from request_log where project_id = $1 and method = $2 and request_id = $3;

-- name: delete_request
delete from request_log where project_id = $1 and method = $2 and request_id = $3 and result = $4;
