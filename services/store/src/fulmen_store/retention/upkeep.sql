-- name: create_partitions
call create_day_partitions($1::date);

-- name: forget_requests
delete from request_log where created_at < now() - interval '24 hours';
