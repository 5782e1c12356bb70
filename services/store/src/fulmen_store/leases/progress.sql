-- Three rules keep every plan a point lookup whatever the statistics say; see rollouts.sql.

-- name: report_progress
-- Of each rollout one report, of the attempt that it belongs to: the lease's or the second one's.
with k as (
    select x.progress, i.c, i.is_first
    from (
        select y.* from unnest($1::uuid[], $2::uuid[], $3::int[], $4::bytea[]) as y (id, session, epoch, progress)
        order by y.id
    ) x
    cross join lateral (
        select q.ctid as c, q.epoch = x.epoch as is_first from item q
        where q.id = x.id
            and case
                when q.epoch = x.epoch then q.session is not distinct from x.session
                else q.hedge_epoch = x.epoch and q.hedge_session is not distinct from x.session
            end
        limit 1 for update
    ) i
)
update item i set
    progress = case when k.is_first then k.progress else i.progress end,
    hedge_progress = case when k.is_first then i.hedge_progress else k.progress end,
    changed = pg_current_xact_id()
from k where i.ctid = k.c;
