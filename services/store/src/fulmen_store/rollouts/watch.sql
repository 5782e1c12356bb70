-- Changes of rollouts, in the order of (transaction id, rollout id) of the last write of each: of its item while it is live,
-- then of its end. Only rows below the oldest running transaction are read: no row can appear behind a cursor.
--
-- `settled` is the oldest running transaction of the look: there is a row with it even if nothing changed, whose id is null.
--
-- Leased rollouts are found by the live sessions. A lease of a session that has ended ends soon, which is a change.

-- name: scan_changes
with b as (select pg_snapshot_xmin(pg_current_snapshot()) as xmin)
select b.xmin::text::bigint as settled, c.xid::text::bigint as xid, c.id, c.run_id
from b
left join (
    (
        select q.changed as xid, q.id, q.run_id from item q
        where q.leased_at is null and q.project_id = $1 and (q.changed, q.id) > ($2::bigint::text::xid8, $3::uuid)
            and q.changed < (select b.xmin from b)
        order by q.changed, q.id limit $4
    )
    union all
    (
        select l.changed, l.id, l.run_id
        from (select s.id from runner_session s where s.ended_at is null) s
        cross join lateral (
            select q.changed, q.id, q.run_id from item q
            where q.session = s.id and q.project_id = $1 and q.changed >= $2::bigint::text::xid8
                and (q.changed, q.id) > ($2::bigint::text::xid8, $3::uuid) and q.changed < (select b.xmin from b)
            order by q.changed, q.id limit $4
        ) l
        order by l.changed, l.id limit $4
    )
    union all
    (
        select q.xid, q.rollout_id, q.run_id from rollout_end q
        where q.project_id = $1 and (q.xid, q.rollout_id) > ($2::bigint::text::xid8, $3::uuid)
            and q.xid < (select b.xmin from b)
        order by q.xid, q.rollout_id limit $4
    )
) c on true
order by c.xid, c.id
limit $4;

-- name: oldest_transaction
select pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
