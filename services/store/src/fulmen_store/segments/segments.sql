-- name: days_with_spans
select days_with_spans($1::date) as day order by day;

-- name: movable_rollouts
-- Those of a day that ended long enough ago, by id, with the chunks that are in the table. Payloads that are blobs stay there.
select q.rollout_id, min(e.project_id) as project_id, count(*)::int as chunk_count, sum(length(q.payload))::bigint as size_bytes
from span_chunk q
cross join lateral (
    select r.project_id from rollout_end r
    where r.rollout_id = q.rollout_id and r.ended_at < now() - $2::float8 * interval '1 second' limit 1
) e
where q.rollout_id > $1 and q.blob is null and true /* days */
group by q.rollout_id
order by q.rollout_id limit $3;

-- name: movable_chunks
select q.rollout_id, q.attempt, q.chunk_id, length(q.payload) as size_bytes
from span_chunk q
where q.rollout_id = any ($1::uuid[]) and q.blob is null and true /* days */
order by q.rollout_id, q.attempt, q.chunk_id limit $2;

-- name: truncate_empty_day
select truncate_empty_day($1::date) as is_empty;

-- name: claim_segment
-- Nothing if another replica writes spans of the project and day.
insert into span_segment (id, project_id, day) values ($1, $2, $3)
on conflict do nothing
returning id;

-- name: move_chunks
-- Takes chunks of one day out of its table; returns those that were still there.
delete from span_chunk q
where q.ctid = any (array(
    select c.place
    from unnest($1::uuid[], $2::int[], $3::uuid[]) as x (rollout_id, attempt, chunk_id)
    cross join lateral (
        select q.ctid as place from span_chunk q
        where q.rollout_id = x.rollout_id and q.attempt = x.attempt and q.chunk_id = x.chunk_id and true /* days */
        limit 1
    ) c
)) and true /* days */
returning q.rollout_id, q.attempt, q.chunk_id;

-- name: insert_extents
insert into span_extent (rollout_id, segment_id, start_byte, heads)
select x.rollout_id, $1::bigint, x.start_byte, x.heads
from unnest($2::uuid[], $3::int[], $4::bytea[]) as x (rollout_id, start_byte, heads);

-- name: finish_segment
-- Nothing if it took so long that the claim was given up.
update span_segment s
set state = 2, size_bytes = $2, live_bytes = $3, dead_since = case when $3::int < $2::int then now() end
where s.id = $1 and s.state = 1
returning s.id;

-- name: extents_of_rollouts
-- A standby may answer.
select e.rollout_id, e.segment_id, e.start_byte, e.heads from span_extent e where e.rollout_id = any ($1::uuid[]);

-- name: remove_extents
delete from span_extent e where e.rollout_id = any ($1::uuid[]) returning e.segment_id, e.heads;

-- name: shrink_segments
-- Segments lose live bytes; one that has none left goes when nobody reads it any more. Rows are locked by id.
with k as (
    select q.id, q.live_bytes - ($2::int[])[array_position($1::bigint[], q.id)] as live
    from span_segment q
    where q.id = any ($1::bigint[]) and q.state = 2
    order by q.id for update
)
update span_segment s
set live_bytes = greatest(0, k.live), dead_since = coalesce(s.dead_since, now()),
    state = case when k.live > 0 then 2 else 3 end,
    remove_at = case when k.live <= 0 then now() + interval '10 minutes' end
from k where s.id = any ($1::bigint[]) and s.id = k.id;

-- name: release_claims
-- Gives up segments that were not finished: one, and all that were claimed 10 minutes ago. Their objects may still be on the way.
update span_segment s set state = 3, remove_at = now() + interval '10 minutes'
where s.id = any (array(
    select q.id from span_segment q
    where q.state = 1 and (q.id = $1 or q.claimed_at < now() - interval '10 minutes')
    order by q.id for update skip locked
));

-- name: removable_segments
select s.id, s.day from span_segment s where s.state = 3 and s.remove_at < now() order by s.remove_at limit $1;

-- name: forget_segments
delete from span_segment s where s.id = any ($1::bigint[]) and s.state = 3;

-- name: wasteful_segments
-- By project and day: segments of which half is dead, of which something has been dead for a week, and many small ones.
select k.project_id, k.day, array_agg(k.id order by k.is_dead desc, k.live_bytes, k.id) as ids,
    array_agg(k.live_bytes order by k.is_dead desc, k.live_bytes, k.id) as live_bytes,
    array_agg(k.is_dead order by k.is_dead desc, k.live_bytes, k.id) as are_dead
from (
    select s.id, s.project_id, s.day, s.live_bytes,
        2::bigint * s.live_bytes <= s.size_bytes or coalesce(s.dead_since < now() - interval '7 days', false) as is_dead
    from span_segment s where s.state = 2
) k
where k.is_dead or 2 * k.live_bytes < $1::bigint
group by k.project_id, k.day
having bool_or(k.is_dead) or count(*) >= $2
order by k.day, k.project_id limit $3;

-- name: extents_of_segments
-- Each by itself: in one scan, a plan could take the order from the primary key and read all extents.
select e.rollout_id, e.segment_id, e.start_byte, e.heads
from unnest($1::bigint[]) as x (segment_id)
cross join lateral (select * from span_extent q where q.segment_id = x.segment_id offset 0) e
order by e.rollout_id, e.segment_id;

-- name: take_extents
delete from span_extent e
where e.ctid = any (array(
    select c.place
    from unnest($1::uuid[], $2::bigint[]) as x (rollout_id, segment_id)
    cross join lateral (
        select q.ctid as place from span_extent q
        where q.rollout_id = x.rollout_id and q.segment_id = x.segment_id limit 1
    ) c
))
returning e.rollout_id, e.segment_id;

-- name: replace_segments
-- Segments whose chunks lie in another one now. Kept for a day: a backup may hold the database of a while ago.
with k as (select q.id from span_segment q where q.id = any ($1::bigint[]) and q.state = 2 order by q.id for update)
update span_segment s
set state = 3, live_bytes = 0, remove_at = now() + interval '1 day'
where s.id = any (array(select k.id from k));

-- name: expire_segments_of_project
-- Those of a deleted project go soon, and while there are any it is not empty.
update span_segment s set remove_at = least(s.remove_at, now() + interval '10 minutes')
where s.project_id = $1 and s.state = 3;

-- name: has_segments
select exists (select 1 from span_segment s where s.project_id = $1) as has;
