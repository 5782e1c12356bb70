-- Usage of model calls, and the rate-limit windows of proxy processes.

-- name: begin_usage
insert into usage_instance as old (id, sequence) values ($1, $2)
on conflict (id) do update set sequence = excluded.sequence, seen_at = now() where old.sequence < excluded.sequence
returning id;

-- name: add_usage_minutes
insert into usage_minute as old (
    project_id, minute, model, backend, request_count, failure_count, prompt_token_count, cached_token_count,
    completion_token_count, cost_micros
)
select
    x.project_id, date_trunc('minute', now()), x.model, x.backend, sum(x.request_count)::bigint,
    sum(x.failure_count)::bigint, sum(x.prompt_token_count)::bigint, sum(x.cached_token_count)::bigint,
    sum(x.completion_token_count)::bigint, sum(x.cost_micros)::bigint
from unnest(
    $1::int[], $2::uuid[], $3::int[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[],
    $10::bigint[], $11::bigint[]
) as x (
    project_id, rollout_id, attempt, model, backend, request_count, failure_count, prompt_token_count,
    cached_token_count, completion_token_count, cost_micros
)
group by x.project_id, x.model, x.backend
order by x.project_id, x.model, x.backend
on conflict (project_id, minute, model, backend) do update set
    request_count = old.request_count + excluded.request_count,
    failure_count = old.failure_count + excluded.failure_count,
    prompt_token_count = old.prompt_token_count + excluded.prompt_token_count,
    cached_token_count = old.cached_token_count + excluded.cached_token_count,
    completion_token_count = old.completion_token_count + excluded.completion_token_count,
    cost_micros = old.cost_micros + excluded.cost_micros;

-- name: add_usage_attempts
-- Attempts of unknown rollouts, or of other projects' rollouts, count in the sums by minute only.
insert into usage_attempt as old (
    rollout_id, attempt, model, backend, project_id, run_id, request_count, failure_count, prompt_token_count,
    cached_token_count, completion_token_count, cost_micros
)
select
    s.rollout_id, s.attempt, s.model, s.backend, s.project_id, r.run_id, s.request_count, s.failure_count,
    s.prompt_token_count, s.cached_token_count, s.completion_token_count, s.cost_micros
from (
    select
        x.project_id, x.rollout_id, x.attempt, x.model, x.backend, sum(x.request_count)::bigint as request_count,
        sum(x.failure_count)::bigint as failure_count, sum(x.prompt_token_count)::bigint as prompt_token_count,
        sum(x.cached_token_count)::bigint as cached_token_count,
        sum(x.completion_token_count)::bigint as completion_token_count, sum(x.cost_micros)::bigint as cost_micros
    from unnest(
        $1::int[], $2::uuid[], $3::int[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[],
        $9::bigint[], $10::bigint[], $11::bigint[]
    ) as x (
        project_id, rollout_id, attempt, model, backend, request_count, failure_count, prompt_token_count,
        cached_token_count, completion_token_count, cost_micros
    )
    where x.rollout_id is not null
    group by x.project_id, x.rollout_id, x.attempt, x.model, x.backend
) s
cross join lateral (
    select q.run_id from rollout q where q.id = s.rollout_id and q.project_id = s.project_id limit 1
) r
order by s.rollout_id, s.attempt, s.model, s.backend
on conflict (rollout_id, attempt, model, backend) do update set
    request_count = old.request_count + excluded.request_count,
    failure_count = old.failure_count + excluded.failure_count,
    prompt_token_count = old.prompt_token_count + excluded.prompt_token_count,
    cached_token_count = old.cached_token_count + excluded.cached_token_count,
    completion_token_count = old.completion_token_count + excluded.completion_token_count,
    cost_micros = old.cost_micros + excluded.cost_micros;

-- name: add_usage_rollouts
-- As above, all attempts of a rollout together.
insert into rollout_usage as old (
    rollout_id, project_id, run_id, prompt_token_count, completion_token_count, cost_micros
)
select s.rollout_id, s.project_id, r.run_id, s.prompt_token_count, s.completion_token_count, s.cost_micros
from (
    select
        x.rollout_id, x.project_id, sum(x.prompt_token_count)::bigint as prompt_token_count,
        sum(x.completion_token_count)::bigint as completion_token_count, sum(x.cost_micros)::bigint as cost_micros
    from unnest($1::int[], $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[]) as x (
        project_id, rollout_id, prompt_token_count, completion_token_count, cost_micros
    )
    where x.rollout_id is not null
    group by x.rollout_id, x.project_id
) s
cross join lateral (
    select q.run_id from rollout q where q.id = s.rollout_id and q.project_id = s.project_id limit 1
) r
order by s.rollout_id
on conflict (rollout_id) do update set
    prompt_token_count = old.prompt_token_count + excluded.prompt_token_count,
    completion_token_count = old.completion_token_count + excluded.completion_token_count,
    cost_micros = old.cost_micros + excluded.cost_micros;

-- name: add_spend
-- Late cost counts in the period in which it arrives; a clock that moves back begins no period anew.
insert into budget_spend as old (project_id, subject, period, period_start, cost_micros)
select
    x.project_id, x.subject, x.period,
    case x.period
        when 1 then date_trunc('day', now(), 'UTC') when 2 then date_trunc('month', now(), 'UTC') else 'epoch'::timestamptz
    end,
    sum(x.cost_micros)::bigint
from unnest($1::int[], $2::text[], $3::smallint[], $4::bigint[]) as x (project_id, subject, period, cost_micros)
group by x.project_id, x.subject, x.period
order by x.project_id, x.subject, x.period
on conflict (project_id, subject, period) do update set
    period_start = greatest(old.period_start, excluded.period_start),
    cost_micros =
        case when old.period_start >= excluded.period_start then old.cost_micros else 0 end + excluded.cost_micros;

-- name: spends
-- Of current periods.
select p.name as project, b.subject, b.period, b.cost_micros
from budget_spend b
join project p on p.id = b.project_id
where ($1::text is null or p.name = $1)
    and b.period_start >= case b.period
        when 1 then date_trunc('day', now(), 'UTC') when 2 then date_trunc('month', now(), 'UTC') else 'epoch'::timestamptz
    end;

-- name: replace_windows
insert into usage_window (instance, project, slot, windows) values ($1, $2, $3, $4)
on conflict (instance) do update set
    project = excluded.project, slot = excluded.slot, windows = excluded.windows, seen_at = now();

-- name: other_windows
-- Of processes for all projects and, with a project, of those for that project.
select w.slot, w.windows, w.seen_at > now() - interval '5 seconds' as is_live
from usage_window w
where w.instance <> $1 and ($2::text is null or w.project in ($2, 'projects/*'))
    and w.seen_at > now() - interval '70 seconds'
order by w.instance;

-- name: usage_clock
select now() as store_time;

-- name: attempt_tokens
select x.n::int as n, t.token_count
from unnest($1::uuid[], $2::int[], $3::text[]) with ordinality as x (rollout_id, attempt, project, n)
cross join lateral (
    select sum(q.prompt_token_count + q.completion_token_count)::bigint as token_count
    from usage_attempt q
    where q.rollout_id = x.rollout_id and q.attempt = x.attempt
        and q.project_id = (select p.id from project p where p.name = x.project)
) t
where t.token_count is not null;

-- name: model_limits
select p.name, p.model_limits from project p
where p.model_limits is not null and ($1::text is null or p.name = $1)
order by p.id;

-- name: ended_rows
-- Of attempts, by rollout and session: whose they are, and the runner's description of itself.
select
    x.n::int as n, p.name as project, coalesce(t.name, '') as training_run, coalesce(a.name, '') as agent, s.info
from unnest($1::uuid[], $2::uuid[]) with ordinality as x (rollout_id, session, n)
cross join lateral (
    select q.project_id, q.run_id, q.agent from rollout q where q.id = x.rollout_id limit 1
) r
cross join lateral (select q.name from project q where q.id = r.project_id limit 1) p
left join lateral (select q.name from training_run q where q.id = r.run_id limit 1) t on true
left join lateral (select q.name from interned_name q where q.id = r.agent limit 1) a on true
left join lateral (select q.info from runner_session q where q.id = x.session limit 1) s on true;

-- name: pause_used_up
-- Pauses the queues of some projects, unless they are paused, and resumes those that were paused for a reason that begins
-- with $3, if they are no longer among these. Returns the projects that were changed.
update project p set
    paused_at = case when w.reason is null then null else now() end, pause_reason = left(coalesce(w.reason, ''), 256)
from project q
left join unnest($1::text[], $2::text[]) as w (name, reason) on w.name = q.name
where p.id = q.id and (
    (w.reason is not null and p.paused_at is null)
    or (w.reason is null and p.paused_at is not null and starts_with(p.pause_reason, $3))
)
returning p.name, p.paused_at is not null as is_paused;

-- name: usage_by_minute
-- A standby may answer.
-- Grouped by 1: model, 2: backend, otherwise all together.
select
    g.name, sum(g.request_count)::bigint as request_count, sum(g.failure_count)::bigint as failure_count,
    sum(g.prompt_token_count)::bigint as prompt_token_count, sum(g.cached_token_count)::bigint as cached_token_count,
    sum(g.completion_token_count)::bigint as completion_token_count, sum(g.cost_micros)::bigint as cost_micros
from (
    select
        case $4::smallint when 1 then u.model when 2 then u.backend else '' end as name, u.request_count,
        u.failure_count, u.prompt_token_count, u.cached_token_count, u.completion_token_count, u.cost_micros
    from usage_minute u
    where u.project_id = $1 and u.minute >= coalesce($2::timestamptz, '-infinity')
        and u.minute < coalesce($3::timestamptz, 'infinity')
) g
where $5::text is null or g.name > $5 collate "C"
group by g.name
order by g.name collate "C"
limit $6;

-- name: usage_by_attempt
-- A standby may answer.
-- Of rollouts from one id to another; with a training run of this one only. Grouped by 1: model, 2: backend, 3: training
-- run, 4: rollout by its id, 5: attempt by its rollout's id and its number, padded to sort, 6: agent, otherwise all together.
select
    g.name, sum(g.request_count)::bigint as request_count, sum(g.failure_count)::bigint as failure_count,
    sum(g.prompt_token_count)::bigint as prompt_token_count, sum(g.cached_token_count)::bigint as cached_token_count,
    sum(g.completion_token_count)::bigint as completion_token_count, sum(g.cost_micros)::bigint as cost_micros
from (
    select
        case $5::smallint
            when 1 then u.model
            when 2 then u.backend
            when 3 then coalesce((select t.name from training_run t where t.id = u.run_id), '')
            when 4 then u.rollout_id::text
            when 5 then u.rollout_id || '/' || lpad(u.attempt::text, 9, '0')
            when 6 then coalesce((
                select n.name from rollout q join interned_name n on n.id = q.agent where q.id = u.rollout_id
            ), '')
            else ''
        end as name,
        u.request_count, u.failure_count, u.prompt_token_count, u.cached_token_count, u.completion_token_count,
        u.cost_micros
    from (
        select p.* from usage_attempt p
        where $2::int is null and p.project_id = $1 and p.rollout_id between $3::uuid and $4::uuid
        union all
        select r.* from usage_attempt r
        where r.project_id = $1 and r.run_id = $2 and r.rollout_id between $3::uuid and $4::uuid
    ) u
) g
where $6::text is null or g.name > $6 collate "C"
group by g.name
order by g.name collate "C"
limit $7;

-- name: usage_series_by_minute
-- A standby may answer.
-- Of projects $1, or of all; in periods that begin at each of $2, to the last of them. Grouped by 1: model, 2: backend, 7: project,
-- otherwise all together. The first $4 groups by cost and tokens, and the sum of the others in place $4 + 1.
with counted as (
    select
        case $3::smallint when 1 then u.model when 2 then u.backend when 7 then p.name else '' end as name,
        width_bucket(u.minute, $2::timestamptz[]) as period, sum(u.request_count)::bigint as request_count,
        sum(u.failure_count)::bigint as failure_count, sum(u.prompt_token_count)::bigint as prompt_token_count,
        sum(u.cached_token_count)::bigint as cached_token_count,
        sum(u.completion_token_count)::bigint as completion_token_count, sum(u.cost_micros)::bigint as cost_micros
    from project p cross join lateral (
        select q.* from usage_minute q
        where q.project_id = p.id and q.minute >= ($2::timestamptz[])[1]
            and q.minute < ($2::timestamptz[])[cardinality($2::timestamptz[])]
    ) u
    where p.deleted_at is null and ($1::int[] is null or p.id = any ($1))
    group by 1, 2
), ranked as (
    select
        c.name, row_number() over (
            order by sum(c.cost_micros) desc, sum(c.prompt_token_count + c.completion_token_count) desc, c.name collate "C"
        ) as place
    from counted c group by c.name
)
select
    least(r.place, $4 + 1)::int as place, c.period, min(r.name) as name,
    sum(c.request_count)::bigint as request_count, sum(c.failure_count)::bigint as failure_count,
    sum(c.prompt_token_count)::bigint as prompt_token_count, sum(c.cached_token_count)::bigint as cached_token_count,
    sum(c.completion_token_count)::bigint as completion_token_count, sum(c.cost_micros)::bigint as cost_micros,
    (select count(*) from ranked)::int as total_count
from counted c join ranked r on r.name = c.name
group by 1, 2 order by 1, 2;

-- name: usage_series_by_attempt
-- A standby may answer.
-- As above, of the attempts of project $1 and, unless null, training run $2, by the time of the rollouts' ids $3. Grouped by
-- 1: model, 2: backend, 3: training run, 6: agent, otherwise all together.
with counted as (
    select
        case $4::smallint
            when 1 then u.model when 2 then u.backend when 3 then u.run_id::text
            when 6 then (select q.agent::text from rollout q where q.id = u.rollout_id)
        end as key,
        width_bucket(u.rollout_id, $3::uuid[]) as period, sum(u.request_count)::bigint as request_count,
        sum(u.failure_count)::bigint as failure_count, sum(u.prompt_token_count)::bigint as prompt_token_count,
        sum(u.cached_token_count)::bigint as cached_token_count,
        sum(u.completion_token_count)::bigint as completion_token_count, sum(u.cost_micros)::bigint as cost_micros
    from usage_attempt u
    where u.project_id = $1 and ($2::int is null or u.run_id = $2) and u.rollout_id >= ($3::uuid[])[1]
        and u.rollout_id < ($3::uuid[])[cardinality($3::uuid[])]
    group by 1, 2
), named as (
    select
        k.key, coalesce(
            case $4::smallint
                when 3 then (select t.name from training_run t where t.id = k.key::int)
                when 6 then (select n.name from interned_name n where n.id = k.key::int)
                else k.key
            end, ''
        ) as name
    from (select distinct c.key from counted c) k
), ranked as (
    select
        n.name, row_number() over (
            order by sum(c.cost_micros) desc, sum(c.prompt_token_count + c.completion_token_count) desc, n.name collate "C"
        ) as place
    from counted c join named n on n.key is not distinct from c.key group by n.name
)
select
    least(r.place, $5 + 1)::int as place, c.period, min(r.name) as name,
    sum(c.request_count)::bigint as request_count, sum(c.failure_count)::bigint as failure_count,
    sum(c.prompt_token_count)::bigint as prompt_token_count, sum(c.cached_token_count)::bigint as cached_token_count,
    sum(c.completion_token_count)::bigint as completion_token_count, sum(c.cost_micros)::bigint as cost_micros,
    (select count(*) from ranked)::int as total_count
from counted c join named n on n.key is not distinct from c.key join ranked r on r.name = n.name
group by 1, 2 order by 1, 2;

-- name: delete_usage_minutes
delete from usage_minute u where u.ctid = any (array(
    select q.ctid from project p
    cross join lateral (
        select m.ctid from usage_minute m where m.project_id = p.id and m.minute < now() - p.retention limit $1
    ) q
    where p.retention is not null
    limit $1
))
returning u.project_id;

-- name: delete_usage_attempts
-- Of rollouts removed by retention.
with d as (
    delete from usage_attempt u where u.ctid = any (array(
        select q.ctid from project p
        cross join lateral (
            select a.ctid from usage_attempt a
            where a.project_id = p.id and a.rollout_id < uuid7_bound(now() - p.retention)
                and not exists (select 1 from rollout r where r.id = a.rollout_id)
            limit $1
        ) q
        where p.retention is not null
        limit $1
    ))
    returning u.rollout_id, u.attempt
), s as (
    -- What was reported while the rollout was removed.
    delete from rollout_usage u where u.rollout_id = any (array(select d.rollout_id from d))
)
select d.attempt from d;

-- name: delete_usage_instances
delete from usage_instance i where i.ctid = any (array(
    select q.ctid from usage_instance q
    where q.seen_at < now() - interval '24 hours'
    order by q.id limit $1 for update skip locked
))
returning 1;

-- name: delete_windows
delete from usage_window w where w.ctid = any (array(
    select q.ctid from usage_window q
    where q.seen_at < now() - interval '1 hour'
    order by q.instance limit $1 for update skip locked
))
returning 1;
