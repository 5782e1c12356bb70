-- name: append_chunks
with k as (
    select
        x.n, x.rollout_id, x.attempt, x.chunk_id, x.span_count, x.codec, x.start_ns, x.end_ns, x.payload,
        x.blob, x.blob_size, r.id is not null as known,
        not x.by_agent or not exists (
            select from attempt a
            where a.rollout_id = x.rollout_id and a.number = x.attempt
                and a.ended_at < now() - $13::float8 * interval '1 second'
        ) as in_time
    from unnest(
        $1::uuid[], $2::int[], $3::uuid[], $4::int[], $5::smallint[], $6::bigint[], $7::bigint[], $8::bytea[],
        $9::int[], $10::bytea[], $11::int[], $12::bool[]
    ) with ordinality as x (
        rollout_id, attempt, chunk_id, span_count, codec, start_ns, end_ns, payload, project_id, blob, blob_size,
        by_agent, n
    )
    left join lateral (
        select q.id from rollout q
        where q.id = x.rollout_id and q.project_id = x.project_id limit 1
    ) r on true
), i as (
    insert into span_chunk (
        rollout_id, attempt, chunk_id, span_count, codec, start_ns, end_ns, payload, blob, blob_size
    )
    select
        k.rollout_id, k.attempt, k.chunk_id, k.span_count, k.codec, k.start_ns, k.end_ns, k.payload, k.blob,
        k.blob_size
    from k where k.known and k.in_time
    on conflict do nothing
)
select k.n::int as n, k.known from k where not (k.known and k.in_time);

-- name: create_partitions_of_rollouts
-- Of those that exist; one row per day, with whether its partition is there.
select create_span_partition(d.day) as is_there
from (
    select distinct uuid7_day(r.id) as day
    from unnest($1::uuid[]) as x (id)
    cross join lateral (select q.id from rollout q where q.id = x.id limit 1) r
) d;

-- name: chunk_heads
-- Chunks in the table, and extents of those in segments. As of one moment: a chunk that is moved is in one of them.
-- With $4, of the table only what this transaction and later ones wrote, or what is so old that it may look so.
select
    x.n::int as n, c.rollout_id, c.attempt, c.chunk_id, c.start_ns, c.end_ns, c.size_bytes, c.segment_id, c.start_byte,
    c.heads
from unnest($1::uuid[], $2::int[], $3::int[]) with ordinality as x (rollout_id, attempt, project_id, n)
cross join lateral (
    select q.id from rollout q
    where q.id = x.rollout_id and q.project_id = x.project_id limit 1
) r
cross join lateral (
    select
        q.rollout_id, q.attempt, q.chunk_id, q.start_ns, q.end_ns,
        coalesce(q.blob_size, length(q.payload)) as size_bytes, null::bigint as segment_id, 0 as start_byte,
        null::bytea as heads
    from span_chunk q
    where q.rollout_id = x.rollout_id and (x.attempt = 0 or q.attempt = x.attempt) and true /* days */
        and ($4::bigint = 0 or age(q.xmin) <= age(($4::bigint % 4294967296)::text::xid))
    union all
    select e.rollout_id, 0, null, 0, 0, 0, e.segment_id, e.start_byte, e.heads
    from span_extent e
    where e.rollout_id = x.rollout_id
) c;

-- name: watched_chunks
-- For many watchers at once, by position. Counts of the primary key: what a poll reads while nothing is new. In segments those
-- of all attempts are counted. `settled` is the oldest transaction that may still write: what older ones wrote is counted.
select
    x.n::int as n,
    (
        select count(*) from span_chunk q
        where q.rollout_id = x.rollout_id and (x.attempt = 0 or q.attempt = x.attempt) and true /* days */
    )::int
    + (select coalesce(sum(length(e.heads)) / 47, 0) from span_extent e where e.rollout_id = x.rollout_id)::int
        as chunk_count,
    not exists (select from rollout q where q.id = x.rollout_id and q.project_id = x.project_id)
    or exists (select from rollout_end q where q.rollout_id = x.rollout_id)
    or exists (select from attempt q where q.rollout_id = x.rollout_id and q.number = x.attempt) as is_over,
    pg_snapshot_xmin(pg_current_snapshot())::text::bigint as settled
from unnest($1::uuid[], $2::int[], $3::int[]) with ordinality as x (rollout_id, attempt, project_id, n)
order by x.n;

-- name: read_chunks
-- A standby may answer.
select
    c.rollout_id, c.attempt, c.chunk_id, c.span_count, c.codec, c.start_ns, c.end_ns, c.payload, c.blob, c.blob_size
from unnest($1::uuid[], $2::int[], $3::uuid[]) with ordinality as x (rollout_id, attempt, chunk_id, n)
cross join lateral (
    select
        q.rollout_id, q.attempt, q.chunk_id, q.span_count, q.codec, q.start_ns, q.end_ns, q.payload, q.blob,
        q.blob_size
    from span_chunk q
    where q.rollout_id = x.rollout_id and q.attempt = x.attempt and q.chunk_id = x.chunk_id and true /* days */
    limit 1
) c
order by x.n;

-- name: rollouts_of_run
-- A standby may answer.
select r.id from rollout r
where r.project_id = $1 and r.run_id = $2 and r.id > $3
order by r.id limit $4;
