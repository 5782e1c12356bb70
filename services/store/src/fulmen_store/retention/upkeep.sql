-- name: create_partitions
call create_day_partitions($1::date);

-- name: delete_old_lost_runners
delete from lost_runner l where l.paused_at is null and l.lost_at < now() - interval '1 day';

-- name: delete_expired_requests
delete from request_log where created_at < now() - interval '24 hours';
