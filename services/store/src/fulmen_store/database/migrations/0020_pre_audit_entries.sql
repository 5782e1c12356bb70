-- Administrative calls, for people who look. The audit file is the record that administrators cannot change.
create table audit_entry (
    id uuid primary key,
    -- The project of the caller's token; of a token for all projects that which the request names, or projects/*.
    project text not null,
    action text not null,
    code text not null,
    reason text not null,
    actor text not null,
    role text not null,
    token_id text not null,
    request text not null check (octet_length(request) <= 65536),
    trace_id text not null,
    left_out bigint not null,
    ended_at timestamptz not null
);
create index audit_entry_of_project on audit_entry (project, id);
