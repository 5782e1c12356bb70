-- Waits for other additions to the project, so that it never has more than the maximum.
-- name: lock_secrets
select p.id from project p where p.id = $1 for no key update;

-- name: set_secret
insert into secret as s (project_id, name, hosts, key_id, sealed)
select $1, $2, $3, $4, $5
where (select count(*) from secret q where q.project_id = $1 and q.name <> $2) < $6::int
on conflict (project_id, name) do update set
    hosts = excluded.hosts, key_id = excluded.key_id, sealed = excluded.sealed, updated_at = now()
returning s.name, s.hosts, s.created_at, s.updated_at;

-- name: list_secrets
select s.name, s.hosts, s.created_at, s.updated_at from secret s where s.project_id = $1 order by s.name;

-- name: delete_secret
delete from secret s where s.project_id = $1 and s.name = $2 returning s.name;

-- name: sealed_secrets
select s.name, s.hosts, s.sealed from secret s where s.project_id = $1 and s.name = any ($2::text[]);

-- name: sealed_backend_keys
select s.name, s.hosts, s.sealed from secret s where s.project_id = $1 and cardinality(s.hosts) > 0 order by s.name;

-- name: secrets_of_keys
select s.project_id, p.name as project, s.name, s.hosts, s.sealed
from secret s join project p on p.id = s.project_id
where s.key_id = any ($1::bytea[])
order by s.project_id, s.name
limit $2;

-- name: reseal_secret
update secret s set key_id = $4, sealed = $5 where s.project_id = $1 and s.name = $2 and s.sealed = $3 returning s.name;

-- The request of a rollout, if this lease on it is held.
-- name: leased_request
select r.request
from rollout r cross join lateral (
    select 1 from item q
    where q.id = r.id and q.project_id = $2 and (
        (q.session = $3 and q.epoch = $4) or (q.hedge_session = $3 and q.hedge_epoch = $4)
    )
    limit 1
) i
where r.id = $1;
