-- Projects that can be changed by who read them, tokens that can be revoked, and sessions that serve one project.

alter table project
    add column revision bigint not null default 1,
    add column created_at timestamptz not null default now();

-- What is known of an issued token; the token itself is not stored. The project is a name, or `projects/*`.
create table issued_token (
    id text primary key check (length(id) = 22),
    project text not null,
    role smallint not null check (role between 1 and 5),
    subject text not null check (length(subject) between 1 and 128),
    created_at timestamptz not null default now(),
    expires_at timestamptz not null check (expires_at > created_at),
    revoked_at timestamptz
);
create index issued_token_newest on issued_token (created_at, id);
create index issued_token_of_project on issued_token (project, created_at, id);
create index issued_token_by_expiry on issued_token (expires_at);
create index issued_token_revoked on issued_token (expires_at) where revoked_at is not null;

-- project: what the runner's token is bound to, so that nobody else's token reaches the session.
alter table runner_session add column project text not null default 'projects/*';
