-- The store replicas that live now, so that they can share the backlog and pass news on. A hint: nothing is safe because
-- of it. The id is minted by each process and never used again.
create table replica (
    id uuid primary key,
    address text not null check (length(address) between 1 and 260),
    runner_count int not null check (runner_count >= 0),
    started_at timestamptz not null default now(),
    lease_until timestamptz not null
) with (fillfactor = 50);
