-- The expressions behind the fields of a rollout filter (fulmen_store.rollouts.filter.Field), over the rows r, i, e and
-- u of the statements in rollout_lists.sql. A test prepares each of them with each of its operators. Of a map, the number is
-- that of the field of fulmen.store.v1.Rollout, and the key takes the place of the one before `/* key */`. A search looks for
-- the text in the whole message first, which is not read then; its letters are small (fulmen_store.rollouts.filter_sql).

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

-- name: training_run
coalesce((select n.name from training_run n where n.id = r.run_id), '')

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

-- name: token_count
u.token_count

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

-- name: request_holds
position(''::bytea /* bytes */ in r.request) > 0

-- name: input
(select v from message_fields(r.request, 7) v limit 1)

-- name: input_search
case when position(''::bytea /* text */ in small_letters(r.request)) > 0 then (
    select position(''::bytea /* text */ in small_letters(v)) > 0
    from message_fields(r.request, 7) v limit 1
) end

-- name: output
(
    select v from (
        select a.report from attempt a
        where a.rollout_id = r.id and a.rollout_state in (4, 5, 6) and a.failure_kind <> 8 order by a.number desc limit 1
    ) a, message_fields(a.report, 10) v limit 1
)

-- name: output_search
(
    select case when position(''::bytea /* text */ in small_letters(a.report)) > 0 then (
        select position(''::bytea /* text */ in small_letters(v)) > 0
        from message_fields(a.report, 10) v limit 1
    ) end
    from (
        select a.report from attempt a
        where a.rollout_id = r.id and a.rollout_state in (4, 5, 6) and a.failure_kind <> 8 order by a.number desc limit 1
    ) a
)
