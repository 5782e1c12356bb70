-- An effect is begun by the transaction that inserts its row, and only for an attempt that holds a lease: an attempt that
-- was lost begins nothing more.

-- name: lock_effects
-- Effects of one rollout begin one after the other. The lock is a statement of its own, before the one that counts: a
-- statement does not see what was committed while it waited.
select pg_advisory_xact_lock(hashtextextended('effects/' || $1::uuid, 0));

-- name: begin_effect
insert into effect as e (rollout_id, name, key, attempt, token)
select $1, $2, $3, $4, $5
from (
    select q.id from item q
    where q.id = $1 and q.project_id is not distinct from $6
        and ((q.session is not null and q.epoch = $4) or (q.hedge_session is not null and q.hedge_epoch = $4))
    limit 1
) i
where (select count(*) from effect c where c.rollout_id = $1) < $7::int
on conflict (rollout_id, name, key) do nothing
returning e.attempt, e.token, e.result;

-- name: effect_of_rollout
select e.attempt, e.token, e.result
from effect e
cross join lateral (select 1 from rollout r where r.id = $1 and r.project_id is not distinct from $4 limit 1) r
where e.rollout_id = $1 and e.name = $2 and e.key = $3;

-- name: count_effects
select count(*)::int as count from effect e where e.rollout_id = $1;

-- name: end_effect
update effect e set result = $5, ended_at = now()
where e.rollout_id = $1 and e.name = $2 and e.key = $3 and e.token = $4 and e.result is null;
