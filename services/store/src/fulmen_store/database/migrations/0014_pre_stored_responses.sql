-- Responses that the LLM proxy keeps, each with what it adds to the one before it.

create table stored_response (
    id uuid primary key,
    project_id int not null references project,
    -- Its name; empty for a response of an app.
    attempt text not null,
    -- Without a foreign key: a response stays when the one before it goes.
    previous_id uuid,
    depth int not null,
    chain_bytes bigint not null,
    -- JSON.
    input bytea not null,
    response bytea not null,
    -- Of both, and 1 KiB for the rest.
    size_bytes int not null,
    expires_at timestamptz not null
);
create index stored_response_oldest on stored_response (project_id, id);
create index stored_response_by_expiry on stored_response (project_id, expires_at);

-- Bytes of the stored responses of a project. Whoever adds or removes some of a project locks its row first.
create table stored_response_size (
    project_id int primary key references project,
    size_bytes bigint not null
) with (fillfactor = 50);
