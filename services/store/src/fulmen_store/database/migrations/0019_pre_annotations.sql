-- Scores that people give to rollouts: of an author one per dimension. They go with the rollout.
create table annotation (
    id uuid primary key,
    project_id int not null,
    rollout_id uuid not null,
    dimension text not null check (dimension ~ '^[a-z0-9_.-]{1,64}$'),
    author text not null check (length(author) between 1 and 128),
    value float8 not null check (value between -1e9 and 1e9),
    -- 4096 characters of up to four bytes.
    comment text not null default '' check (octet_length(comment) <= 16384),
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    unique (rollout_id, dimension, author)
);
create index annotation_newest on annotation (project_id, id);
create index annotation_of_dimension on annotation (project_id, dimension, id);
create index annotation_of_author on annotation (project_id, author, id);
