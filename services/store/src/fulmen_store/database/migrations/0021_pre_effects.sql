-- Side effects that agents declare, of live rollouts and those that have ended. They go with the rollout.
create table effect (
    rollout_id uuid not null,
    name text not null check (name ~ '^[A-Za-z0-9_.-]{1,64}$'),
    -- 256 characters of up to four bytes.
    key text not null check (octet_length(key) <= 1024),
    attempt int not null check (attempt >= 1),
    token text not null check (length(token) between 16 and 64),
    -- JSON; null until it is known that the effect was done.
    result bytea check (octet_length(result) <= 65536),
    began_at timestamptz not null default now(),
    ended_at timestamptz,
    primary key (rollout_id, name, key)
);
