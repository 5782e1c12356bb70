-- name: state_of_server
-- A standby, or a read-only server, cannot do the store's work. Its time is that of all tokens.
select current_setting('transaction_read_only') = 'on' as is_read_only, extract(epoch from clock_timestamp())::float8 as now_s;

-- name: written_position
select pg_current_wal_lsn()::text as position;

-- name: has_replayed
select pg_last_wal_replay_lsn() >= $1::text::pg_lsn;
