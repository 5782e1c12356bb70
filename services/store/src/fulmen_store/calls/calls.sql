-- columns: call
--   id uuid, conversation text, model text, backend text, policy text, policy_version bigint, http_status int, error text,
--   finish_reason text, created_at timestamptz, duration_s float8, prompt_token_count bigint, cached_token_count bigint,
--   completion_token_count bigint, cost_micros bigint, message_count int, content bytea, size_bytes int, end_hash bytea,
--   retention interval

-- Transactions that add or remove calls of a project wait for each other, so that the sum is right and no
-- conversation is removed while a call is added to it.
-- name: lock_recorded
insert into recorded_size as s (project_id, size_bytes) values ($1, 0)
on conflict (project_id) do update set size_bytes = s.size_bytes
returning s.size_bytes;

-- name: known_calls
select c.id from recorded_call c where c.id = any ($1::uuid[]);

-- name: continued_conversations
-- The newest of the calls that end alike.
select distinct on (c.end_hash) c.end_hash, c.conversation
from recorded_call c
where c.project_id = $1 and c.end_hash = any ($2::bytea[])
order by c.end_hash, c.id desc;

-- name: add_conversations
insert into conversation as v (project_id, id, model, call_count, created_at, updated_at)
select $1, q.id, q.model, q.call_count, q.created_at, q.updated_at
from unnest($2::text[], $3::text[], $4::bigint[], $5::timestamptz[], $6::timestamptz[])
    as q (id, model, call_count, created_at, updated_at)
on conflict (project_id, id) do update set
    call_count = v.call_count + excluded.call_count, updated_at = greatest(v.updated_at, excluded.updated_at);

-- name: add_calls
insert into recorded_call (
    project_id, id, conversation, model, backend, policy, policy_version, http_status, error, finish_reason, created_at,
    duration_s, prompt_token_count, cached_token_count, completion_token_count, cost_micros, message_count, content,
    size_bytes, end_hash, expires_at
)
select
    $1, q.id, q.conversation, q.model, q.backend, q.policy, q.policy_version, q.http_status, q.error, q.finish_reason,
    q.created_at, q.duration_s, q.prompt_token_count, q.cached_token_count, q.completion_token_count, q.cost_micros,
    q.message_count, q.content, q.size_bytes, q.end_hash, now() + q.retention
from unnest({call[2]}) as q ({call});

-- name: set_recorded_size
update recorded_size s set size_bytes = greatest(0, s.size_bytes + $2::bigint) where s.project_id = $1
returning s.size_bytes;

-- name: remove_oldest_calls
-- As many as have these bytes.
delete from recorded_call c where c.id = any (array(
    select q.id from (
        select o.id, sum(o.size_bytes) over (order by o.id) - o.size_bytes as older_bytes
        from (
            select r.id, r.size_bytes from recorded_call r where r.project_id = $1 order by r.project_id, r.id limit 1000
        ) o
    ) q
    where q.older_bytes < $2::bigint
))
returning c.conversation, c.size_bytes;

-- name: projects_with_expired_calls
select s.project_id from recorded_size s
where exists (select 1 from recorded_call c where c.project_id = s.project_id and c.expires_at < now());

-- name: remove_expired_calls
delete from recorded_call c where c.id = any (array(
    select q.id from recorded_call q
    where q.project_id = $1 and q.expires_at < now()
    order by q.project_id, q.expires_at limit $2
))
returning c.conversation, c.size_bytes;

-- name: remove_conversation_calls
delete from recorded_call c where c.project_id = $1 and c.conversation = any ($2::text[])
returning c.conversation, c.size_bytes;

-- name: settle_conversations
-- After calls were removed: counts those that are left, and removes conversations without any.
with gone as (
    delete from conversation v
    where v.project_id = $1 and v.id = any ($2::text[])
        and not exists (select 1 from recorded_call c where c.project_id = v.project_id and c.conversation = v.id)
    returning v.id
)
update conversation v set call_count = (
    select count(*) from recorded_call c where c.project_id = v.project_id and c.conversation = v.id
)
where v.project_id = $1 and v.id = any ($2::text[]) and v.id not in (select g.id from gone g);

-- name: list_calls
-- A standby may answer.
select
    c.id, c.conversation, c.model, c.backend, c.policy, c.policy_version, c.http_status, c.error, c.finish_reason,
    c.created_at, c.duration_s, c.prompt_token_count, c.cached_token_count, c.completion_token_count, c.cost_micros,
    c.message_count, c.size_bytes, c.expires_at, c.score, c.label
from (
    select q.*, v.score, v.label
    from recorded_call q join conversation v on v.project_id = q.project_id and v.id = q.conversation
    where q.project_id = $1 and q.id < $2
) c
where true /* filter */
order by c.id desc
limit $3;

-- name: get_call
-- A standby may answer.
select
    c.id, c.conversation, c.model, c.backend, c.policy, c.policy_version, c.http_status, c.error, c.finish_reason,
    c.created_at, c.duration_s, c.prompt_token_count, c.cached_token_count, c.completion_token_count, c.cost_micros,
    c.message_count, c.size_bytes, c.expires_at, v.score, v.label
from recorded_call c join conversation v on v.project_id = c.project_id and v.id = c.conversation
where c.project_id = $1 and c.id = $2;

-- name: call_contents
-- A standby may answer.
select c.id, c.content from recorded_call c where c.project_id = $1 and c.id = any ($2::uuid[]);

-- name: list_conversations
-- A standby may answer.
select c.conversation, c.model, c.call_count, c.score, c.label, c.created_at, c.updated_at
from (
    select v.id as conversation, v.* from conversation v
    where v.project_id = $1 and (v.created_at, v.id) < ($2, $3)
) c
where true /* filter */
order by c.created_at desc, c.conversation desc
limit $4;

-- name: rate_conversation
update conversation v set score = $3, label = $4 where v.project_id = $1 and v.id = $2
returning v.id as conversation, v.model, v.call_count, v.score, v.label, v.created_at, v.updated_at;
