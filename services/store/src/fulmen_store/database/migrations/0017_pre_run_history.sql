-- What the steps of training runs measured, and their notices. Rows go with the run.
create table run_event (
    project_id int not null,
    run text not null,
    sequence bigint not null check (sequence > 0),
    happened_at timestamptz not null,
    -- 1: step, 2: notice, 3: rollback to step.
    kind smallint not null check (kind between 1 and 3),
    -- Of a notice: null.
    step bigint,
    metrics text[],
    numbers float8[],
    reward_values float8[],
    reward_counts bigint[],
    reward_bin float8,
    severity text,
    message text,
    primary key (project_id, run, sequence),
    foreign key (project_id, run) references run_lease (project_id, name) on delete cascade,
    constraint run_event_has_step check ((step is null) = (kind = 2)),
    constraint run_event_metrics_are_pairs check (coalesce(cardinality(metrics), 0) = coalesce(cardinality(numbers), 0)),
    constraint run_event_rewards_are_pairs
        check (coalesce(cardinality(reward_values), 0) = coalesce(cardinality(reward_counts), 0))
);
create index run_event_notices on run_event (project_id, run, sequence) where kind = 2;
create index run_event_rollbacks on run_event (project_id, run, sequence) where kind = 3;
