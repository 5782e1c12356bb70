-- `lost_beside` is how many leases a session held when it expired; null for leases that it got afterwards, which never ran.
--
-- Claims and ends of attempts are compare-and-set on (rollout, lease session, epoch). A row that was locked but has
-- changed since the statement's snapshot is not returned; the caller classifies and retries. Where a row is found by its
-- id, its session is compared by `is not distinct from`, so that no plan uses the index of sessions, which finds all leases
-- of a session. Rows with two leases are handled by hedging.sql.
--
-- Statements that wait for locks of several rows take them in the order of the rows' keys, whatever the caller's is: no two of
-- them wait for each other.

-- name: claim_rollouts
-- `continues` is the first of the attempts that were lost (LEASE_LOST, RELEASED) since one ended otherwise; null if the last one
-- was not lost.
with k as (
    select x.session, i.c
    from unnest($1::uuid[], $2::uuid[]) as x (id, session)
    cross join lateral (
        select q.ctid as c from item q
        where q.id = x.id and q.session is null and q.run_at <= now() and (q.deadline is null or q.deadline > now())
        limit 1 for update skip locked
    ) i
), u as (
    update item i set
        session = k.session, epoch = greatest(i.epoch, i.hedge_epoch) + 1, leased_at = now(), changed = pg_current_xact_id()
    from k where i.ctid = k.c
    returning i.id, i.session, i.epoch, i.project_id, i.task_type
)
select
    u.id, u.session, u.epoch, u.project_id, u.task_type, r.request,
    case when u.epoch > 1 then (
        select min(a.number) from attempt a
        where a.rollout_id = u.id and a.failure_kind in (3, 7) and a.number > coalesce((
            select max(b.number) from attempt b where b.rollout_id = u.id and b.failure_kind not in (3, 7)
        ), 0)
    ) end as continues
from u
cross join lateral (select q.request from rollout q where q.id = u.id limit 1) r;

-- name: bound_attempts
-- Unless their leases have ended.
with k as (
    select x.epoch, x.bound_ms, i.c
    from unnest($1::uuid[], $2::uuid[], $3::int[], $4::int[]) as x (id, session, epoch, bound_ms)
    cross join lateral (
        select q.ctid as c, q.session, q.epoch from item q where q.id = x.id limit 1 for update skip locked
    ) i
    where i.session = x.session and i.epoch = x.epoch
)
update item i set bound_ms = k.bound_ms, bound_epoch = k.epoch from k where i.ctid = k.c returning i.id;

-- name: held_leases
select
    i.id, l.session, l.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested, extract(epoch from i.deadline - now())::float8 as time_left_s,
    i.hedge_session is not null as hedged, i.runner_losses,
    (select s.lost_leases from runner_session s where s.id = l.session and s.ended_at >= l.leased_at) as lost_beside
from unnest($1::uuid[]) as x (id)
cross join lateral (
    select q.id, q.session, q.epoch, q.project_id, q.charged, q.max_attempts, q.retry_mask, q.backoff_ms,
        q.cancel_requested, q.deadline, q.leased_at, q.hedge_session, q.hedge_epoch, q.hedge_leased_at, q.runner_losses
    from item q where q.id = x.id and q.session is not null limit 1
) i
cross join lateral (
    values (i.session, i.epoch, i.leased_at), (i.hedge_session, i.hedge_epoch, i.hedge_leased_at)
) as l (session, epoch, leased_at)
where l.session is not null;

-- name: session_leases
select
    i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested, extract(epoch from i.deadline - now())::float8 as time_left_s, i.hedge_session is not null as hedged,
    i.runner_losses,
    (select s.lost_leases from runner_session s where s.id = i.session and s.ended_at >= i.leased_at) as lost_beside
from item i where i.session = any ($1::uuid[])
union all
select
    i.id, i.hedge_session, i.hedge_epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested, extract(epoch from i.deadline - now())::float8 as time_left_s, true as hedged,
    i.runner_losses,
    (select s.lost_leases from runner_session s where s.id = i.hedge_session and s.ended_at >= i.hedge_leased_at)
        as lost_beside
from item i where i.hedge_session = any ($1::uuid[]);

-- name: orphaned_leases
(
select
    i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested, extract(epoch from i.deadline - now())::float8 as time_left_s, i.hedge_session is not null as hedged,
    i.runner_losses,
    (select s.lost_leases from runner_session s where s.id = i.session and s.ended_at >= i.leased_at) as lost_beside
from item i
where i.session is not null
    and not exists (select 1 from runner_session s where s.id = i.session and s.ended_at is null)
limit $1
)
union all
(
select
    i.id, i.hedge_session, i.hedge_epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested, extract(epoch from i.deadline - now())::float8 as time_left_s, true as hedged,
    i.runner_losses,
    (select s.lost_leases from runner_session s where s.id = i.hedge_session and s.ended_at >= i.hedge_leased_at)
        as lost_beside
from item i
where i.hedge_session is not null
    and not exists (select 1 from runner_session s where s.id = i.hedge_session and s.ended_at is null)
limit $1
);

-- name: end_attempts
with k as (
    select
        x.state, x.kind, x.rollout_state, x.delay_s, x.charge, x.report, x.runner_loss, x.reward, x.failure, x.printed,
        i.c, i.session, i.leased_at
    from (
        select y.* from unnest(
            $1::uuid[], $2::uuid[], $3::int[], $4::boolean[], $5::smallint[], $6::smallint[], $7::smallint[],
            $8::float8[], $9::smallint[], $10::bytea[], $11::int[], $12::smallint[], $13::float8[], $14::text[],
            $15::bytea[]
        ) as y (
            id, session, epoch, cancel_requested, state, kind, rollout_state, delay_s, charge, report, project_id,
            runner_loss, reward, failure, printed
        )
        order by y.id
    ) x
    cross join lateral (
        select q.ctid as c, q.session, q.leased_at from item q
        where q.id = x.id and q.session is not distinct from x.session and q.epoch = x.epoch
            and q.cancel_requested = x.cancel_requested and q.hedge_session is null
            -- As above: no plan may take the index that begins with the project.
            and q.project_id is not distinct from x.project_id
        limit 1 for update
    ) i
), d as (
    delete from item i using k where i.ctid = k.c and k.rollout_state in (4, 5, 6)
    returning
        i.id, i.epoch, i.project_id, i.run_id, i.group_key, i.group_size, i.sort_priority, i.labels, i.task_type, i.agent,
        i.runner_losses, k.session, k.leased_at, k.state, k.kind, k.rollout_state, k.report, k.reward, k.failure, k.printed
), c as (
    insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live)
    select d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent, -count(*) from d
    group by d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent
), u as (
    update item i set
        session = null, leased_at = null, cancel_requested = false, charged = i.charged + k.charge,
        runner_losses = i.runner_losses + k.runner_loss,
        run_at = now() + k.delay_s * interval '1 second', delayed = k.delay_s > 0, progress = null,
        changed = pg_current_xact_id()
    from k where i.ctid = k.c and k.rollout_state = 3
    returning
        i.id, i.epoch, i.project_id, i.run_id, i.group_key, i.group_size, i.sort_priority, i.labels, i.task_type, i.agent,
        i.runner_losses, i.request_bytes, k.session, k.leased_at, k.state, k.kind, k.rollout_state, k.report, k.printed
), a as (
    insert into attempt (
        rollout_id, number, state, failure_kind, rollout_state, session, started_at, report, printed
    )
    select d.id, d.epoch, d.state, d.kind, d.rollout_state, d.session, d.leased_at, d.report, d.printed from d
    union all
    select u.id, u.epoch, u.state, u.kind, u.rollout_state, u.session, u.leased_at, u.report, u.printed from u
), e as (
    insert into rollout_end (
        rollout_id, project_id, run_id, group_key, group_size, state, failure_kind, reward, duration_s, failure_message
    )
    select
        d.id, d.project_id, d.run_id, d.group_key, d.group_size, d.rollout_state,
        case d.rollout_state when 4 then 0 when 6 then 6 else d.kind end, d.reward,
        extract(epoch from now() - d.leased_at)::float8, d.failure
    from d
), l as (
    -- A version is paused by $16 rollouts that lost their runners, each within a day of the one before.
    insert into lost_runner as old (agent, project_id, rollouts, paused_at)
    select d.agent, d.project_id, array_agg(d.id), case when count(*) >= $16::int then now() end
    from d where d.kind = 9 and d.rollout_state = 5 and d.agent is not null
    group by d.agent, d.project_id order by d.agent
    on conflict (agent) do update set
        lost_at = now(),
        rollouts = case
            when old.paused_at is null and old.lost_at < now() - interval '1 day' then excluded.rollouts
            else (excluded.rollouts || old.rollouts)[:10]
        end,
        paused_at = case
            when old.paused_at is not null then old.paused_at
            when old.lost_at >= now() - interval '1 day'
                and cardinality(excluded.rollouts) + cardinality(old.rollouts) >= $16::int then now()
            else excluded.paused_at
        end
)
select
    d.id, d.epoch, d.session, d.project_id, d.sort_priority, d.labels, d.group_key, d.task_type, d.agent, d.rollout_state,
    d.kind as failure_kind, d.runner_losses, 0 as request_bytes, null::float8 as first_run_at_s,
    extract(epoch from now() - d.leased_at)::float8 as duration_s
from d
union all
select
    u.id, u.epoch, u.session, u.project_id, u.sort_priority, u.labels, u.group_key, u.task_type, u.agent, u.rollout_state,
    u.kind as failure_kind, u.runner_losses, u.request_bytes, null::float8 as first_run_at_s,
    extract(epoch from now() - u.leased_at)::float8 as duration_s
from u;

-- name: ended_attempts
select r.project_id, a.rollout_id, a.number, a.session, a.failure_kind, a.report
from unnest($1::uuid[], $2::int[]) as x (id, number)
cross join lateral (
    select q.rollout_id, q.number, q.session, q.failure_kind, q.report from attempt q
    where q.rollout_id = x.id and q.number = x.number limit 1
) a
cross join lateral (select q.project_id from rollout q where q.id = x.id limit 1) r;

-- name: refill_queue
select
    i.id, i.project_id, i.sort_priority, i.labels, i.group_key, i.task_type, i.agent, i.runner_losses, i.request_bytes,
    case when i.epoch = 0 then extract(epoch from i.run_at) end::float8 as first_run_at_s,
    greatest(extract(epoch from i.run_at - now()), 0)::float8 as delay_s
from item i
where i.project_id = $1 and (i.sort_priority, i.id) > ($2, $3) and i.session is null
order by i.sort_priority, i.id
limit $4;

-- name: oldest_of_each_priority
-- The priorities are found by one probe each; there are 201 at most.
with recursive r as (
    (select q.sort_priority from item q where q.project_id = $1 order by q.sort_priority limit 1)
    union all
    select (select q.sort_priority from item q where q.project_id = $1 and q.sort_priority > r.sort_priority order by q.sort_priority limit 1)
    from r where r.sort_priority is not null
)
select
    i.id, i.project_id, i.sort_priority, i.labels, i.group_key, i.task_type, i.agent, i.runner_losses, i.request_bytes,
    case when i.epoch = 0 then extract(epoch from i.run_at) end::float8 as first_run_at_s,
    greatest(extract(epoch from i.run_at - now()), 0)::float8 as delay_s
from r
cross join lateral (
    select q.id, q.project_id, q.sort_priority, q.labels, q.group_key, q.task_type, q.agent, q.runner_losses,
        q.request_bytes, q.epoch, q.run_at
    from item q
    where q.project_id = $1 and q.sort_priority = r.sort_priority and q.session is null
    order by q.id limit $2
) i
where r.sort_priority is not null;

-- name: all_projects
select
    p.id, p.name, p.weight, p.max_running, p.max_queued, p.rules, p.order_revision,
    p.paused_at is not null or p.deleted_at is not null as is_paused, p.deleted_at is not null as is_deleted,
    (select array_agg(l.agent order by l.agent) from lost_runner l where l.project_id = p.id and l.paused_at is not null)
        as paused_agents
from project p order by p.id;

-- name: open_session
insert into runner_session (id, subject, host, info, lease_until, project)
values ($1, $2, $3, $4, now() + $5 * interval '1 second', $6);

-- name: resume_session
update runner_session s set lease_until = now() + $2 * interval '1 second'
where s.id = $1 and s.ended_at is null and s.subject = $3 and s.project = $4
returning s.id;

-- name: session_projects
select s.id, s.project from runner_session s where s.id = any ($1::uuid[]);

-- name: renew_sessions
-- Joined by key, not changed by ctid: a session that another replica renews concurrently must still be found.
-- The first load of a minute is kept, of the last 120 minutes that have one.
with k as (
    select
        x.id, x.heard, x.load, x.ended, x.failed,
        x.load is not null and (s.load_minute is null or s.load_minute < date_trunc('minute', now())) as samples
    from (
        select y.* from unnest($1::uuid[], $3::boolean[], $4::bytea[], $5::bigint[], $6::bigint[])
            as y (id, heard, load, ended, failed)
        order by y.id
    ) x
    cross join lateral (
        select q.id, q.load_minute from runner_session q where q.id = x.id and q.ended_at is null limit 1 for update
    ) s
)
update runner_session s set
    lease_until = case when k.heard then now() + $2 * interval '1 second' else s.lease_until end,
    load = coalesce(k.load, s.load), ended_count = s.ended_count + k.ended, failed_count = s.failed_count + k.failed,
    load_minute = case when k.samples then date_trunc('minute', now()) else s.load_minute end,
    load_minutes = case
        when k.samples then (array_append(s.load_minutes, date_trunc('minute', now())))[greatest(cardinality(s.loads) - 118, 1):]
        else s.load_minutes
    end,
    loads = case
        when k.samples then (array_append(s.loads, k.load))[greatest(cardinality(s.loads) - 118, 1):] else s.loads
    end
from k
where s.id = k.id and s.ended_at is null
returning s.id;

-- name: end_sessions
with k as (
    select s.id
    from (select y.id from unnest($1::uuid[]) as y (id) order by y.id) x
    cross join lateral (
        select q.id from runner_session q where q.id = x.id and q.ended_at is null limit 1 for update
    ) s
)
update runner_session s set ended_at = now() from k where s.id = k.id and s.ended_at is null
returning s.id;

-- name: end_expired_sessions
-- Ends none if the clock does not show what is expected, $1 within $2: it was set, and the caller has not seen it yet.
-- A session that is being renewed is not expired.
with k as (
    select q.id from runner_session q
    where q.ended_at is null and q.lease_until < now() and abs(extract(epoch from now())::float8 - $1::float8) <= $2::float8
    order by q.id for update skip locked
)
update runner_session s set
    ended_at = now(),
    lost_leases = (select count(*) from item i where i.session = s.id)
        + (select count(*) from item i where i.hedge_session = s.id)
from k
where s.id = k.id
returning s.id, s.lost_leases;
