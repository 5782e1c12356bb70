-- Hedged rollouts: the rare rows with a second lease, which the statements of leases.sql skip. Conditions are written so
-- that rows are found by id: `hedge_leased_at` instead of `hedge_session`, which has an index.

-- name: hedgeable_attempts
select
    i.id, i.project_id, i.sort_priority, i.labels, i.group_key, i.task_type, i.agent, i.session,
    i.runner_losses, i.request_bytes, null::float8 as first_run_at_s, extract(epoch from now() - i.leased_at)::float8 as age_s
from item i
-- What runs alone on its runner gets no second attempt.
where i.project_id = any ($1::int[]) and i.hedged and i.runner_losses < 2 and i.session is not null
    and i.hedge_session is null and not i.cancel_requested
order by i.leased_at
limit $2;

-- name: claim_hedges
with k as (
    select x.session, i.c
    from unnest($1::uuid[], $2::uuid[], $3::float8[]) as x (id, session, least_age_s)
    cross join lateral (
        select q.ctid as c from item q
        where q.id = x.id and q.hedged and q.session is distinct from x.session and q.leased_at is not null
            and q.hedge_leased_at is null and not q.cancel_requested
            and q.leased_at + x.least_age_s * interval '1 second' <= now()
            and (q.deadline is null or q.deadline > now())
        limit 1 for update skip locked
    ) i
), u as (
    update item i set
        hedge_session = k.session, hedge_epoch = greatest(i.epoch, i.hedge_epoch) + 1, hedge_leased_at = now(),
        changed = pg_current_xact_id()
    from k where i.ctid = k.c
    returning i.id, i.hedge_session as session, i.hedge_epoch as epoch, i.project_id, i.task_type
)
select u.id, u.session, u.epoch, u.project_id, u.task_type, r.request, null::int as continues
from u
cross join lateral (select q.request from rollout q where q.id = u.id limit 1) r;

-- name: end_hedged_attempts
with k as (
    select
        x.session, x.epoch, x.state, x.kind, x.rollout_state, x.report, x.reward, x.failure, x.printed, i.c, i.leased_at,
        i.rival_session, i.rival_epoch, i.rival_leased_at
    from (
        select y.* from unnest(
            $1::uuid[], $2::uuid[], $3::int[], $4::boolean[], $5::smallint[], $6::smallint[], $7::smallint[], $8::bytea[],
            $9::int[], $10::float8[], $11::text[], $12::bytea[]
        ) as y (
            id, session, epoch, cancel_requested, state, kind, rollout_state, report, project_id, reward, failure, printed
        )
        order by y.id
    ) x
    cross join lateral (
        select
            q.ctid as c,
            case when q.epoch = x.epoch then q.leased_at else q.hedge_leased_at end as leased_at,
            case when q.epoch = x.epoch then q.hedge_session else q.session end as rival_session,
            case when q.epoch = x.epoch then q.hedge_epoch else q.epoch end as rival_epoch,
            case when q.epoch = x.epoch then q.hedge_leased_at else q.leased_at end as rival_leased_at
        from item q
        where q.id = x.id and q.cancel_requested = x.cancel_requested and q.hedge_leased_at is not null
            and q.project_id is not distinct from x.project_id
            and (
                (q.session is not distinct from x.session and q.epoch = x.epoch)
                or (q.hedge_session is not distinct from x.session and q.hedge_epoch = x.epoch)
            )
        limit 1 for update
    ) i
), d as (
    delete from item i using k where i.ctid = k.c and k.rollout_state in (4, 6)
    returning
        i.id, i.project_id, i.run_id, i.group_key, i.group_size, i.sort_priority, i.labels, i.task_type, i.agent,
        k.session, k.epoch, k.leased_at, k.state, k.kind, k.rollout_state, k.report, k.reward, k.failure, k.printed,
        k.rival_session, k.rival_epoch, k.rival_leased_at
), c as (
    insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live)
    select d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent, -count(*) from d
    group by d.project_id, d.run_id, d.sort_priority, d.labels, d.task_type, d.agent
), u as (
    update item i set
        session = k.rival_session, epoch = k.rival_epoch, leased_at = k.rival_leased_at,
        hedge_session = null, hedge_leased_at = null, hedge_epoch = k.epoch, changed = pg_current_xact_id(),
        progress = case when i.epoch = k.epoch then i.hedge_progress else i.progress end, hedge_progress = null
    from k where i.ctid = k.c and k.rollout_state = 2
    returning
        i.id, i.project_id, i.group_key, i.sort_priority, i.labels, i.task_type, i.agent,
        k.session, k.epoch, k.leased_at, k.state, k.kind, k.rollout_state, k.report, k.printed
), a as (
    insert into attempt (
        rollout_id, number, state, failure_kind, rollout_state, session, started_at, report, printed
    )
    select d.id, d.epoch, d.state, d.kind, d.rollout_state, d.session, d.leased_at, d.report, d.printed from d
    union all
    select d.id, d.rival_epoch, 3, 8, d.rollout_state, d.rival_session, d.rival_leased_at, ''::bytea, null from d
    union all
    select u.id, u.epoch, u.state, u.kind, u.rollout_state, u.session, u.leased_at, u.report, u.printed from u
), e as (
    insert into rollout_end (
        rollout_id, project_id, run_id, group_key, group_size, state, failure_kind, reward, duration_s, failure_message
    )
    select
        d.id, d.project_id, d.run_id, d.group_key, d.group_size, d.rollout_state,
        case d.rollout_state when 4 then 0 else 6 end, d.reward, extract(epoch from now() - d.leased_at)::float8,
        d.failure
    from d
)
select
    d.id, d.epoch, d.session, d.project_id, d.sort_priority, d.labels, d.group_key, d.task_type, d.agent, d.rollout_state,
    d.kind as failure_kind, null::float8 as first_run_at_s,
    extract(epoch from now() - d.leased_at)::float8 as duration_s, d.rival_session, d.rival_epoch
from d
union all
select
    u.id, u.epoch, u.session, u.project_id, u.sort_priority, u.labels, u.group_key, u.task_type, u.agent, u.rollout_state,
    u.kind as failure_kind, null::float8 as first_run_at_s,
    extract(epoch from now() - u.leased_at)::float8 as duration_s, null::uuid as rival_session, 0 as rival_epoch
from u;
