-- columns: response
--   id uuid, attempt text, previous_id uuid, input bytea, response bytea, size_bytes int, expires_at timestamptz

-- Transactions that add or remove responses of a project wait for each other, so that the sum is right.
-- name: lock_stored_responses
insert into stored_response_size as s (project_id, size_bytes) values ($1, 0)
on conflict (project_id) do update set size_bytes = s.size_bytes
returning s.size_bytes;

-- name: add_stored_responses
insert into stored_response (project_id, {response}, depth, chain_bytes)
select
    $1, q.id, q.attempt, q.previous_id, q.input, q.response, q.size_bytes, least(q.expires_at, now() + $2::interval),
    coalesce(p.depth, 0) + 1, coalesce(p.chain_bytes, 0) + q.size_bytes
from unnest({response[3]}) as q ({response})
left join stored_response p on p.id = q.previous_id and p.project_id = $1
on conflict (id) do nothing
returning size_bytes;

-- name: set_stored_response_size
update stored_response_size s set size_bytes = greatest(0, s.size_bytes + $2::bigint) where s.project_id = $1
returning s.size_bytes;

-- name: remove_oldest_stored_responses
-- As many as have these bytes.
delete from stored_response r where r.id = any (array(
    select q.id from (
        select o.id, sum(o.size_bytes) over (order by o.id) - o.size_bytes as older_bytes
        from (
            select s.id, s.size_bytes from stored_response s
            where s.project_id = $1 order by s.project_id, s.id limit 1000
        ) o
    ) q
    where q.older_bytes < $2::bigint
))
returning r.size_bytes;

-- name: projects_with_expired_responses
select s.project_id from stored_response_size s
where exists (select 1 from stored_response r where r.project_id = s.project_id and r.expires_at < now());

-- name: remove_expired_stored_responses
delete from stored_response r where r.id = any (array(
    select q.id from stored_response q
    where q.project_id = $1 and q.expires_at < now()
    order by q.project_id, q.expires_at limit $2
))
returning r.size_bytes;

-- name: stored_responses
-- A response that an attempt, or an app if it is empty, may read, and those before it, until they have so many bytes.
with recursive chain as (
    select r.*, 1 as place, r.size_bytes::bigint as sum_bytes
    from stored_response r
    where r.project_id = $1 and r.id = $2 and r.attempt = coalesce(nullif($3, ''), r.attempt) and r.expires_at > now()
    union all
    select r.*, c.place + 1, c.sum_bytes + r.size_bytes
    -- The limit keeps the look-up a probe by id.
    from chain c cross join lateral (select q.* from stored_response q where q.id = c.previous_id limit 1) r
    where c.place < $4::int and c.sum_bytes + r.size_bytes <= $5::bigint and r.expires_at > now()
        and r.project_id = c.project_id
)
select c.id, c.previous_id, c.depth, c.chain_bytes, c.input, c.response from chain c order by c.place;

-- name: remove_stored_response
delete from stored_response r
where r.project_id = $1 and r.id = $2 and r.attempt = coalesce(nullif($3, ''), r.attempt) and r.expires_at > now()
returning r.size_bytes;
