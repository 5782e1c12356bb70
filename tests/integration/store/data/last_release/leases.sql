-- Claims and ends of attempts are compare-and-set on (rollout, lease session, epoch). A row that was locked but has
-- changed since the statement's snapshot is simply not returned; the caller classifies and repeats.

-- name: claim_rollouts
with k as (
    select x.session, i.c
    from unnest($1::uuid[], $2::uuid[]) as x (id, session)
    cross join lateral (
        select q.ctid as c from item q
        where q.id = x.id and q.session is null and q.run_at <= now() limit 1 for update skip locked
    ) i
), u as (
    update item i set session = k.session, epoch = i.epoch + 1, leased_at = now()
    from k where i.ctid = k.c
    returning i.id, i.session, i.epoch, i.project_id
)
select u.id, u.session, u.epoch, u.project_id, r.request
from u
cross join lateral (select q.request from rollout q where q.id = u.id limit 1) r;

-- name: held_leases
select i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested
from unnest($1::uuid[]) as x (id)
cross join lateral (
    select q.id, q.session, q.epoch, q.project_id, q.charged, q.max_attempts, q.retry_mask, q.backoff_ms,
        q.cancel_requested
    from item q where q.id = x.id and q.session is not null limit 1
) i;

-- name: session_leases
select i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested
from item i where i.session = any ($1::uuid[]);

-- name: orphaned_leases
select i.id, i.session, i.epoch, i.project_id, i.charged, i.max_attempts, i.retry_mask, i.backoff_ms,
    i.cancel_requested
from item i
where i.session is not null
    and not exists (select 1 from runner_session s where s.id = i.session and s.ended_at is null)
limit $1;

-- name: end_attempts
with k as (
    select
        x.state, x.kind, x.rollout_state, x.delay_s, x.charge, x.report, i.c, i.session, i.leased_at
    from unnest(
        $1::uuid[], $2::uuid[], $3::int[], $4::boolean[], $5::smallint[], $6::smallint[], $7::smallint[],
        $8::float8[], $9::smallint[], $10::bytea[]
    ) as x (id, session, epoch, cancel_requested, state, kind, rollout_state, delay_s, charge, report)
    cross join lateral (
        select q.ctid as c, q.session, q.leased_at from item q
        where q.id = x.id and q.session = x.session and q.epoch = x.epoch and q.cancel_requested = x.cancel_requested
        limit 1 for update
    ) i
), d as (
    delete from item i using k where i.ctid = k.c and k.rollout_state in (4, 5, 6)
    returning
        i.id, i.epoch, i.project_id, i.run_id, i.group_key, i.group_size, i.rank, i.labels, k.session, k.leased_at,
        k.state, k.kind, k.rollout_state, k.report
), u as (
    update item i set
        session = null, leased_at = null, cancel_requested = false, charged = i.charged + k.charge,
        run_at = now() + k.delay_s * interval '1 second'
    from k where i.ctid = k.c and k.rollout_state = 3
    returning
        i.id, i.epoch, i.project_id, i.run_id, i.group_key, i.group_size, i.rank, i.labels, k.session, k.leased_at,
        k.state, k.kind, k.rollout_state, k.report
), a as (
    insert into attempt (
        rollout_id, number, state, failure_kind, rollout_state, session, started_at, report
    )
    select d.id, d.epoch, d.state, d.kind, d.rollout_state, d.session, d.leased_at, d.report from d
    union all
    select u.id, u.epoch, u.state, u.kind, u.rollout_state, u.session, u.leased_at, u.report from u
), e as (
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind)
    select
        d.id, d.project_id, d.run_id, d.group_key, d.group_size, d.rollout_state,
        case d.rollout_state when 4 then 0 when 6 then 6 else d.kind end
    from d
)
select d.id, d.epoch, d.session, d.project_id, d.rank, d.labels, d.rollout_state from d
union all
select u.id, u.epoch, u.session, u.project_id, u.rank, u.labels, u.rollout_state from u;

-- name: ended_attempts
select a.rollout_id, a.number, a.session, a.failure_kind, a.report
from unnest($1::uuid[], $2::int[]) as x (id, number)
cross join lateral (
    select q.rollout_id, q.number, q.session, q.failure_kind, q.report from attempt q
    where q.rollout_id = x.id and q.number = x.number limit 1
) a;

-- name: refill_queue
select
    i.id, i.project_id, i.rank, i.labels,
    greatest(extract(epoch from i.run_at - now()), 0)::float8 as delay_s
from item i
where i.project_id = $1 and (i.rank, i.id) > ($2, $3) and i.session is null
order by i.rank, i.id
limit $4;

-- name: all_projects
select p.id, p.name, p.weight from project p order by p.id;

-- name: open_session
insert into runner_session (id, subject, host, info, lease_until)
values ($1, $2, $3, $4, now() + $5 * interval '1 second');

-- name: resume_session
update runner_session s set lease_until = now() + $2 * interval '1 second'
where s.id = $1 and s.ended_at is null and s.subject = $3
returning s.id;

-- name: renew_sessions
update runner_session s set lease_until = now() + $2 * interval '1 second'
where s.id = any ($1::uuid[]) and s.ended_at is null
returning s.id;

-- name: end_sessions
update runner_session s set ended_at = now()
where s.id = any ($1::uuid[]) and s.ended_at is null
returning s.id;

-- name: end_expired_sessions
update runner_session s set ended_at = now()
where s.ended_at is null and s.lease_until < now()
returning s.id;

-- name: list_sessions
select
    s.id, s.info, s.opened_at, s.lease_until,
    (select count(*) from item i where i.session = s.id) as running
from runner_session s
where s.ended_at is null and s.id > $1
order by s.id
limit $2;

-- name: find_session
select
    s.id, s.info, s.opened_at, s.lease_until,
    (select count(*) from item i where i.session = s.id) as running
from runner_session s
where s.ended_at is null and s.id = $1;
