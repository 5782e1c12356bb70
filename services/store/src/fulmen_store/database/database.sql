-- name: is_read_only
-- A standby, or a server that was told to take no writes, cannot do the store's work.
select current_setting('transaction_read_only') = 'on';
