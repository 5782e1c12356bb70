-- name: create_partitions
call create_day_partitions($1::date);

-- name: delete_expired_requests
delete from request_log where created_at < now() - interval '24 hours';
