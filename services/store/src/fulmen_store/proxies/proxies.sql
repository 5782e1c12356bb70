-- columns: counts
--   call_count bigint, infra_failure_count bigint, unusable_count bigint, prompt_token_count bigint,
--   completion_token_count bigint, throttled_count bigint

-- name: renew_proxy
-- Returns the database's time, and how many other processes live.
with me as (
    insert into proxy (id, scope, serves_alone, contact_at, left_at)
    values ($1, $2, $3, now(), case when $4::boolean then now() end)
    on conflict (id, scope) do update set
        serves_alone = excluded.serves_alone, contact_at = excluded.contact_at, left_at = excluded.left_at
)
select now() as store_time, (
    select count(*)::int from proxy p
    where p.id <> $1 and p.left_at is null and p.contact_at > now() - interval '10 seconds'
) as other_count;

-- name: save_accounts
-- Numbers only grow: a process that has forgotten an attempt counts its calls from 0 again.
insert into capture_account as old (proxy, scope, rollout_id, attempt, project_id, is_open, {counts})
select $1, $2, x.rollout_id, x.attempt, x.project_id, x.is_open, {x.counts}
from unnest($3::uuid[], $4::int[], $5::int[], $6::boolean[], {counts[7]})
    as x (rollout_id, attempt, project_id, is_open, {counts})
-- An attempt of another project, or of none, has no account.
cross join lateral (
    select 1 from rollout r where r.id = x.rollout_id and r.project_id is not distinct from x.project_id limit 1
) r
order by x.rollout_id, x.attempt, x.project_id
on conflict (rollout_id, attempt, project_id, proxy, scope) do update set
    is_open = excluded.is_open,
    call_count = greatest(old.call_count, excluded.call_count),
    infra_failure_count = greatest(old.infra_failure_count, excluded.infra_failure_count),
    unusable_count = greatest(old.unusable_count, excluded.unusable_count),
    prompt_token_count = greatest(old.prompt_token_count, excluded.prompt_token_count),
    completion_token_count = greatest(old.completion_token_count, excluded.completion_token_count),
    throttled_count = greatest(old.throttled_count, excluded.throttled_count),
    changed_at = now();

-- name: capture_totals
-- A process that serves alone may have answered any attempt that was leased until 10 s after its last contact; two more are for
-- clocks.
select
    x.n::int as n, coalesce(s.is_open, false) or coalesce(alone.is_open, false) as is_open,
    coalesce(s.is_lost, false) or coalesce(alone.is_lost, false) as is_lost,
    coalesce(s.call_count, 0) as call_count, coalesce(s.infra_failure_count, 0) as infra_failure_count,
    coalesce(s.unusable_count, 0) as unusable_count, coalesce(s.prompt_token_count, 0) as prompt_token_count,
    coalesce(s.completion_token_count, 0) as completion_token_count, coalesce(s.throttled_count, 0) as throttled_count
from unnest($1::uuid[], $2::int[], $3::int[]) with ordinality as x (rollout_id, attempt, project_id, n)
cross join lateral (
    select
        bool_or(q.is_open and p.contact_at > now() - interval '10 seconds') as is_open,
        bool_or(q.is_open and coalesce(p.contact_at <= now() - interval '10 seconds', true)) as is_lost,
        sum(q.call_count)::bigint as call_count, sum(q.infra_failure_count)::bigint as infra_failure_count,
        sum(q.unusable_count)::bigint as unusable_count, sum(q.prompt_token_count)::bigint as prompt_token_count,
        sum(q.completion_token_count)::bigint as completion_token_count,
        sum(q.throttled_count)::bigint as throttled_count
    from capture_account q
    left join proxy p on p.id = q.proxy and p.scope = q.scope
    where q.rollout_id = x.rollout_id and q.attempt = x.attempt and q.project_id = x.project_id and q.proxy <> $4
) s
cross join lateral (
    select
        bool_or(p.contact_at > now() - interval '10 seconds') as is_open,
        bool_or(p.contact_at <= now() - interval '10 seconds') as is_lost
    from proxy p
    cross join lateral (
        select i.leased_at, i.hedge_epoch, i.hedge_leased_at from item i where i.id = x.rollout_id limit 1
    ) i
    where p.serves_alone and p.left_at is null and p.id <> $4
        and case when i.hedge_epoch = x.attempt then i.hedge_leased_at else i.leased_at end
            <= p.contact_at + interval '12 seconds'
) alone;

-- name: delete_old_accounts
-- An attempt lasts a day at most. Rollout ids begin with the time of their creation.
delete from capture_account a where a.ctid = any (array(
    select q.ctid from capture_account q
    where q.rollout_id < (
        lpad(to_hex((extract(epoch from now() - interval '2 days') * 1000)::bigint), 12, '0') || repeat('0', 20)
    )::uuid
        and q.changed_at < now() - interval '2 days'
    order by q.rollout_id limit $1 for update skip locked
))
returning 1;

-- name: delete_old_proxies
delete from proxy p where p.ctid = any (array(
    select q.ctid from proxy q
    where q.contact_at < now() - interval '2 days'
    order by q.contact_at limit $1 for update skip locked
))
returning 1;
