-- name: is_read_only
-- A standby, or a read-only server, cannot do the store's work.
select current_setting('transaction_read_only') = 'on';
