-- What was written while PostgreSQL's clock was ahead lies further in the future than anything that is written otherwise. Run
-- once at the start of a replica and whenever the clock was set; the cost may grow with the backlog. A second's difference is
-- none: a transaction that began a moment later may be visible already. Rows are locked in the order of their keys, as by all
-- statements that wait for locks of several.

-- name: mend_waiting
-- $1: the longest back-off, seconds. A rollout that is created without a not-before time may run from that moment on.
with k as (
    select q.id from item q join rollout r on r.id = q.id
    where q.session is null and q.run_at > now() + interval '1 second'
        and case when q.epoch = 0 then q.run_at = r.created_at else q.run_at > now() + $1::float8 * interval '1 second' end
    order by q.id for update of q
)
update item i set run_at = now(), changed = pg_current_xact_id() from k where i.id = k.id
returning i.project_id;

-- name: mend_leases
-- $1: the grace of cancelled attempts, seconds.
with k as (
    select q.id from item q
    where q.session is not null
        and (
            q.leased_at > now() or q.hedge_leased_at > now() or q.cancel_by > now() + $1::float8 * interval '1 second'
        )
    order by q.id for update
)
update item i set
    leased_at = case when i.leased_at > now() then now() else i.leased_at end,
    hedge_leased_at = case when i.hedge_leased_at > now() then now() else i.hedge_leased_at end,
    cancel_by = case
        when i.cancel_by > now() + $1::float8 * interval '1 second' then now() + $1::float8 * interval '1 second'
        else i.cancel_by
    end,
    changed = pg_current_xact_id()
from k where i.id = k.id;

-- name: mend_sessions
-- $1: the longest lease, seconds.
with k as (
    select q.id from runner_session q
    where q.ended_at is null and q.lease_until > now() + $1::float8 * interval '1 second'
    order by q.id for update
)
update runner_session s set lease_until = now() + $1::float8 * interval '1 second' from k where s.id = k.id;

-- name: mend_replicas
with k as (
    select q.id from replica q
    where q.lease_until > now() + $1::float8 * interval '1 second'
    order by q.id for update
)
update replica r set lease_until = now() + $1::float8 * interval '1 second' from k where r.id = k.id;

-- name: mend_run_leases
with k as (
    select q.project_id, q.name from run_lease q
    where q.expires_at > now() + $1::float8 * interval '1 second'
    order by q.project_id, q.name for update
)
update run_lease l set expires_at = now() + $1::float8 * interval '1 second' from k
where l.project_id = k.project_id and l.name = k.name;
