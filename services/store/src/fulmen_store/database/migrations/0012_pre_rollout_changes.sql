-- Every write of a live rollout that a watcher shows notes its transaction, by which changes are found in order
-- (docs/decisions/0050). Stores of the last version note creations alone.
alter table item add column changed xid8 not null default pg_current_xact_id();
-- Waiting rollouts have an index of their own, leased ones are found through that of sessions: a claim, the hottest write,
-- makes no entry more than before. By `leased_at`, which is null where the session is: no other statement asks for that, so no
-- other plan walks this index.
create index item_changed on item (project_id, changed, id) where leased_at is null;
drop index item_leased;
create index item_leased on item (session, changed) include (project_id) where session is not null;

-- What the agents of the two leases reported last: serialized fulmen.store.v1.AttemptProgress.
alter table item add column progress bytea check (octet_length(progress) <= 2048);
alter table item add column hedge_progress bytea check (octet_length(hedge_progress) <= 2048);

-- End of what the agent printed: serialized fulmen.store.v1.PrintedTail. Read on request alone.
alter table attempt add column printed bytea check (octet_length(printed) <= 66560);
