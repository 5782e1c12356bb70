-- The expressions behind the fields of a rollout filter (fulmen_store.rollouts.filter.Field), over the rows r, i, e and
-- u of the statements in rollout_lists.sql. A test prepares each of them with each of its operators. Of a map, the number is
-- that of the field of fulmen.store.v1.Rollout, and the key takes the place of the one before `/* key */`.

-- name: state
coalesce(e.state, case when i.session is not null then 2 when i.delayed and i.epoch > 0 then 3 else 1 end)

-- name: failure_kind
coalesce(e.failure_kind, 0)

-- name: mode
r.mode

-- name: priority
- r.sort_priority

-- name: group_id
coalesce(r.group_id, '')

-- name: task_type
coalesce((select n.name from interned_name n where n.id = r.task_type), '')

-- name: agent
coalesce((select n.name from interned_name n where n.id = r.agent), '')

-- name: create_time
r.created_at

-- name: end_time
e.ended_at

-- name: ended_attempt_count
(select count(*) from attempt a where a.rollout_id = r.id)

-- name: reward
e.reward

-- name: duration
e.duration_s

-- name: prompt_token_count
u.prompt_token_count

-- name: completion_token_count
u.completion_token_count

-- name: cost_micros
u.cost_micros

-- name: name
r.id::text

-- name: metadata
(
    select v from message_fields(r.request, 15) e, message_fields(e, 1) k, message_fields(e, 2) v
    where k = ''::bytea /* key */ limit 1
)

-- name: required_labels
(
    select v from message_fields(r.request, 13) e, message_fields(e, 1) k, message_fields(e, 2) v
    where k = ''::bytea /* key */ limit 1
)

-- name: resource_versions
(
    select v from message_fields(r.request, 10) e, message_fields(e, 1) k, message_fields(e, 2) v
    where k = ''::bytea /* key */ limit 1
)
