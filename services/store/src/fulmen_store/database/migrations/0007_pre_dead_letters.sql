-- Lists of a project without a training run, and its dead rollouts.
create index rollout_by_project on rollout (project_id, id);
create index rollout_end_dead on rollout_end (project_id, rollout_id) where state = 5;

-- Dead rollouts that were run again: a second run by filter finds its key taken. Insert-only.
create table rollout_retry (
    rollout_id uuid primary key,
    retried_as uuid not null,
    retried_at timestamptz not null default now()
);
