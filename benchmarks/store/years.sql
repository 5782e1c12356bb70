-- What `years.py` writes of one day: $1 the day, $2 its rollouts, $3 their training run, $4 spans of each, $5 bytes of each
-- span. All of them have ended, one in twenty without success. Everything follows from the day and a number, so a day that is
-- written again is the same.
with made as (
    select
        n,
        (
            lpad(to_hex((extract(epoch from $1::date)::bigint * 1000 + n::bigint * 86399000 / $2::int)), 12, '0') || '7'
            || substr(h, 1, 3) || '8' || substr(h, 4, 15)
        )::uuid as id,
        (substr(h, 1, 12) || '7' || substr(h, 14, 3) || '9' || substr(h, 18, 15))::uuid as other,
        ($1::date::timestamp at time zone 'UTC') + n * (interval '86399 seconds' / $2::int) as at,
        n % 20 = 0 as failed,
        h
    from generate_series(0, $2::int - 1) as n, lateral md5($1::date::text || '/' || n) as h
), r as (
    insert into rollout (id, project_id, run_id, sort_priority, mode, request, created_at)
    select id, 1, $3::int, 0, 1, convert_to(repeat(h, 12), 'utf8'), at from made
), a as (
    insert into attempt (rollout_id, number, state, failure_kind, rollout_state, session, started_at, ended_at, report)
    select
        id, 1, case when failed then 3 else 2 end, failed::int, case when failed then 5 else 4 end, other, at,
        at + interval '1 minute', convert_to(repeat(h, 3), 'utf8')
    from made
), e as (
    insert into rollout_end (
        rollout_id, project_id, run_id, group_size, state, failure_kind, reward, duration_s, ended_at
    )
    select
        id, 1, $3::int, 1, case when failed then 5 else 4 end, failed::int, case when not failed then (n % 1000) / 1000.0 end, 60,
        at + interval '1 minute'
    from made
)
insert into span_chunk (rollout_id, attempt, chunk_id, span_count, codec, start_ns, end_ns, payload)
select
    id, 1, other, $4::int, 2, extract(epoch from at)::bigint * 1000000000, extract(epoch from at)::bigint * 1000000000 + 1,
    decode(repeat(h, $4::int * $5::int / 16), 'hex')
from made
