-- Dead rollouts (FAILED), and those that were run again. Both walk `rollout_end_dead`, oldest first.

-- name: retryable_window
select q.rollout_id as id from rollout_end q
where q.project_id = $1 and q.state = 5 and q.rollout_id > $2
order by q.rollout_id offset $3 limit 1;

-- name: list_retryable_rollouts
select r.id, octet_length(r.request) as size_bytes
from rollout_end e
cross join lateral (
    select q.id, q.run_id, q.request, q.created_at, q.sort_priority, q.mode, q.group_id, q.task_type, q.agent
    from rollout q where q.id = e.rollout_id limit 1
) r
cross join lateral (
    select null::int as epoch, null::uuid as session, false as delayed
) i
left join lateral (
    select q.prompt_token_count, q.completion_token_count, q.token_count, q.cost_micros
    from rollout_usage q where q.rollout_id = r.id limit 1
) u on true
where e.project_id = $1 and e.state = 5 and e.rollout_id > $2 and e.rollout_id <= $3
    and ($5::int is null or e.run_id = $5)
    and not exists (select from rollout_retry t where t.rollout_id = e.rollout_id)
    and true /* filter */
order by e.rollout_id
limit $4;

-- name: mark_retried_once
insert into rollout_retry (rollout_id, retried_as)
select x.rollout_id, x.retried_as from unnest($1::uuid[], $2::uuid[]) as x (rollout_id, retried_as)
order by x.rollout_id;

-- name: mark_retried
insert into rollout_retry (rollout_id, retried_as)
select x.rollout_id, x.retried_as from unnest($1::uuid[], $2::uuid[]) as x (rollout_id, retried_as)
order by x.rollout_id
on conflict (rollout_id) do nothing;
