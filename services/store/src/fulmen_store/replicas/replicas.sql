-- The table has a handful of rows. Both parts of a renewal see the state before it: the caller's own row is excluded, and
-- long expired rows are removed by any replica.

-- name: renew_replica
with me as (
    insert into replica (id, address, runner_count, lease_until)
    values ($1, $2, $3, now() + $4 * interval '1 second')
    on conflict (id) do update set
        address = excluded.address, runner_count = excluded.runner_count, lease_until = excluded.lease_until
), forgotten as (
    delete from replica r where r.id = any (array(
        select q.id from replica q
        where q.lease_until < now() - interval '1 hour' and q.id <> $1
        order by q.id limit 100 for update skip locked
    ))
)
select r.id, r.address, r.runner_count from replica r where r.lease_until > now() and r.id <> $1 order by r.id;

-- name: remove_replica
delete from replica r where r.id = $1;
