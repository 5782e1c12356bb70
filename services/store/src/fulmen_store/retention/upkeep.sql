-- name: create_partition
select create_span_partition($1::date) as is_there;

-- What expires by its age alone, in batches: rows that another replica removes are left to it.

-- name: delete_old_lost_runners
delete from lost_runner l where l.ctid = any (array(
    select q.ctid from lost_runner q
    where q.paused_at is null and q.lost_at < now() - interval '1 day'
    order by q.agent limit $1 for update skip locked
))
returning 1;

-- name: delete_expired_requests
delete from request_log l where l.ctid = any (array(
    select q.ctid from request_log q
    where q.created_at < now() - interval '24 hours'
    order by q.created_at limit $1 for update skip locked
))
returning 1;

-- name: delete_ended_sessions
-- The attempts that a session ran name their host through it.
delete from runner_session s where s.ctid = any (array(
    select q.ctid from runner_session q
    where q.ended_at < now() - interval '90 days'
    order by q.ended_at limit $1 for update skip locked
))
returning 1;
