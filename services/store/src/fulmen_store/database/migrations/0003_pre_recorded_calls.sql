-- Recorded model calls of apps, and their conversations.

create table conversation (
    project_id int not null references project,
    id text not null check (id ~ '^[A-Za-z0-9._:@-]{1,128}$'),
    model text not null,
    call_count bigint not null,
    score double precision,
    label text not null default '' check (length(label) <= 128),
    created_at timestamptz not null,
    updated_at timestamptz not null,
    primary key (project_id, id)
) with (fillfactor = 70);
create index conversation_newest on conversation (project_id, created_at, id);

create table recorded_call (
    id uuid primary key,
    project_id int not null,
    conversation text not null,
    model text not null,
    backend text not null,
    policy text not null,
    policy_version bigint not null,
    http_status int not null,
    error text not null,
    finish_reason text not null,
    created_at timestamptz not null,
    duration_s double precision not null,
    -- 0: unknown.
    prompt_token_count bigint not null,
    cached_token_count bigint not null,
    completion_token_count bigint not null,
    cost_micros bigint not null,
    message_count int not null,
    -- Serialized fulmen.store.v1.CallContent.
    content bytea not null,
    -- Of the content, and 1 KiB for the rest.
    size_bytes int not null,
    -- Over messages and answer: a later call that begins with them continues the conversation.
    end_hash bytea check (length(end_hash) = 32),
    expires_at timestamptz not null,
    foreign key (project_id, conversation) references conversation on delete cascade
);
create index recorded_call_newest on recorded_call (project_id, id);
create index recorded_call_of_conversation on recorded_call (project_id, conversation);
create index recorded_call_continued on recorded_call (project_id, end_hash) where end_hash is not null;
create index recorded_call_by_expiry on recorded_call (project_id, expires_at);

-- Bytes of the recorded calls of a project. Whoever adds or removes calls of a project locks its row first.
create table recorded_size (
    project_id int primary key references project,
    size_bytes bigint not null
) with (fillfactor = 50);
