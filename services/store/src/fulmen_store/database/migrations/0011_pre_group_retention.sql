-- What retention needs to remove the groups of rollouts that are gone. The last release writes no project; its groups go
-- when no project has a rollout as old.
alter table rollout_group
    add column project_id int,
    add column touched_at timestamptz not null default now();
create index rollout_group_by_age on rollout_group using brin (touched_at) with (autosummarize = on);
