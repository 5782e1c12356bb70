-- What a project's rollouts are handed out by. Columns and tables only; the last release writes rows without them.

-- rules: a serialized fulmen.store.v1.QueueRules; null means the defaults. A quota that is null is no limit.
alter table project
    add column rules bytea,
    add column max_running int check (max_running between 1 and 1000000),
    add column max_queued int check (max_queued between 1 and 100000000);

-- How long successful attempts of a task type took: how many fell into each logarithmic bucket of
-- fulmen_store.scheduling.durations.
create table task_duration (
    task_type int not null references interned_name,
    bucket smallint not null,
    count bigint not null check (count > 0),
    primary key (task_type, bucket)
) with (fillfactor = 70);

-- A second lease of a running rollout that is hedged. When one of the two ends, the other is the ordinary lease, and
-- hedge_epoch stays behind so that no epoch is granted twice: the next one is above both.
alter table item
    add column hedge_session uuid,
    add column hedge_epoch int check (hedge_epoch > 0),
    add column hedge_leased_at timestamptz,
    add constraint item_hedge_is_whole check (
        (hedge_session is null) = (hedge_leased_at is null) and (hedge_session is null or hedge_epoch is not null)
    ),
    add constraint item_hedge_only_while_running check (hedge_session is null or session is not null);
create index item_hedged on item (hedge_session) where hedge_session is not null;
create index item_hedgeable on item (project_id) where hedged and session is not null;

-- An attempt may fail while its rival runs on (2), and one is superseded (8) when its rival succeeds.
alter table attempt
    drop constraint attempt_end_is_legal,
    add constraint attempt_end_is_legal check (
        (rollout_state = 4 and (state = 2 or failure_kind = 8))
        or (rollout_state = 5 and state = 3 and failure_kind between 1 and 5)
        or (rollout_state in (2, 3) and state = 3 and failure_kind in (1, 2, 3, 4, 5, 7))
        or (rollout_state = 6)
    );
