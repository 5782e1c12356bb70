-- The feed of a training run reads what its rollouts ended, never what others did.
create index rollout_end_by_run on rollout_end (project_id, run_id, xid, rollout_id) where run_id is not null;

create index runner_session_ended on runner_session (ended_at) where ended_at is not null;

-- Names go with the rollouts that used them. A replica marks a name that it uses at least once an hour.
alter table training_run add column used_at timestamptz not null default now();
alter table interned_name add column used_at timestamptz not null default now();
create index training_run_by_use on training_run (project_id, used_at);
create index interned_name_by_use on interned_name (project_id, used_at);
alter table task_duration drop constraint task_duration_task_type_fkey;
alter table task_duration add constraint task_duration_task_type_fkey
    foreign key (task_type) references interned_name on delete cascade;

-- A day before the oldest rollout of a project was created, or before now if it has none: what was last used before has no
-- rollout any more.
create function unused_since(of_project int) returns timestamptz language sql stable as $$
    select coalesce(
        to_timestamp(('x' || left(replace(min(x.id::text), '-', ''), 12))::bit(48)::bigint / 1000.0), now()
    ) - interval '1 day'
    from (select q.id from rollout q where q.project_id = of_project order by q.id limit 1) x
$$;

-- How many live rollouts there are, by what they are counted by: sums of these rows. Whoever creates or ends rollouts adds a
-- row for each kind of them in the same commit, so that no one counts the backlog; rows are folded into one per kind.
create table live_count (
    project_id int not null,
    run_id int,
    sort_priority smallint not null,
    labels text[],
    task_type int,
    agent int,
    live bigint not null,
    folded boolean not null default false
) with (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0);
create index live_count_by_project on live_count (project_id);

-- The lock on the table that comes with the column keeps others from changing it until all is counted.
alter table item add column delayed boolean not null default false;
insert into live_count (project_id, run_id, sort_priority, labels, task_type, agent, live, folded)
select i.project_id, i.run_id, i.sort_priority, i.labels, i.task_type, i.agent, count(*), true from item i
group by i.project_id, i.run_id, i.sort_priority, i.labels, i.task_type, i.agent;

-- `delayed`: whether a rollout waits for its not-before time or its back-off, or did when it was last written.
update item set delayed = true where session is null and run_at > now();
create index item_delayed on item (run_at) where delayed and session is null;
