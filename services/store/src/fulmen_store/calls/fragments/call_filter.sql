-- The expressions behind the fields of a filter of calls or conversations (fulmen_store.calls.calls), over the rows c of
-- the statements in calls.sql. A test prepares each of them with each of its operators.

-- name: conversation
c.conversation

-- name: model
c.model

-- name: backend
c.backend

-- name: policy
c.policy

-- name: policy_version
c.policy_version

-- name: http_status
c.http_status

-- name: error
c.error

-- name: finish_reason
c.finish_reason

-- name: create_time
c.created_at

-- name: update_time
c.updated_at

-- name: duration
c.duration_s

-- name: prompt_token_count
c.prompt_token_count

-- name: completion_token_count
c.completion_token_count

-- name: cost_micros
c.cost_micros

-- name: message_count
c.message_count

-- name: call_count
c.call_count

-- name: score
c.score

-- name: label
c.label
