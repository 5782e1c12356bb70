-- What a project's rollouts are handed out by. Columns and tables only; the last release writes rows without them.

-- rules: a serialized fulmen.store.v1.QueueRules; null means the defaults. A quota that is null is no limit.
alter table project
    add column rules bytea,
    add column max_running int check (max_running between 1 and 1000000),
    add column max_queued int check (max_queued between 1 and 100000000);

-- How long successful attempts of a task type took: how many fell into each logarithmic bucket of
-- fulmen_store.domain.durations.
create table task_duration (
    task_type int not null references interned_name,
    bucket smallint not null,
    count bigint not null check (count > 0),
    primary key (task_type, bucket)
) with (fillfactor = 70);
