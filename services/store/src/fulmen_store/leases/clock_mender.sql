-- What was written while PostgreSQL's clock was ahead lies further in the future than anything that is written otherwise. Run
-- once at the start of a replica and whenever the clock was set; the cost may grow with the backlog. A second's difference is
-- none: a transaction that began a moment later may be visible already.

-- name: mend_waiting
-- $1: the longest back-off, seconds. A rollout that is created without a not-before time may run from that moment on.
update item i set run_at = now()
from rollout r
where i.session is null and i.run_at > now() + interval '1 second' and r.id = i.id
    and case when i.epoch = 0 then i.run_at = r.created_at else i.run_at > now() + $1::float8 * interval '1 second' end
returning i.project_id;

-- name: mend_leases
-- $1: the grace of cancelled attempts, seconds.
update item i set
    leased_at = case when i.leased_at > now() then now() else i.leased_at end,
    hedge_leased_at = case when i.hedge_leased_at > now() then now() else i.hedge_leased_at end,
    cancel_by = case
        when i.cancel_by > now() + $1::float8 * interval '1 second' then now() + $1::float8 * interval '1 second'
        else i.cancel_by
    end
where i.session is not null
    and (
        i.leased_at > now() or i.hedge_leased_at > now() or i.cancel_by > now() + $1::float8 * interval '1 second'
    );

-- name: mend_sessions
-- $1: the longest lease, seconds.
update runner_session s set lease_until = now() + $1::float8 * interval '1 second'
where s.ended_at is null and s.lease_until > now() + $1::float8 * interval '1 second';

-- name: mend_replicas
update replica r set lease_until = now() + $1::float8 * interval '1 second'
where r.lease_until > now() + $1::float8 * interval '1 second';

-- name: mend_run_leases
update run_lease l set expires_at = now() + $1::float8 * interval '1 second'
where l.expires_at > now() + $1::float8 * interval '1 second';
