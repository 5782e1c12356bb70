-- name: add_token
insert into issued_token (id, project, role, subject, expires_at)
values ($1, $2, $3, $4, now() + $5::float8 * interval '1 second')
returning id, project, role, subject, created_at, expires_at, revoked_at;

-- name: extend_token
insert into issued_token as t (id, project, role, subject, expires_at)
values ($1, $2, $3, $4, now() + $5::float8 * interval '1 second')
on conflict (id) do update set expires_at = greatest(t.expires_at, excluded.expires_at)
where t.revoked_at is null
returning t.id, t.project, t.role, t.subject, t.created_at, t.expires_at, t.revoked_at;

-- name: revoke_token
update issued_token t set revoked_at = coalesce(t.revoked_at, now())
where t.id = $1 and ($2::text is null or t.project = $2)
returning t.id;

-- name: list_tokens
select t.id, t.project, t.role, t.subject, t.created_at, t.expires_at, t.revoked_at
from issued_token t
where (t.created_at, t.id) < ($1, $2) and t.expires_at > now()
order by t.created_at desc, t.id desc
limit $3;

-- name: list_project_tokens
select t.id, t.project, t.role, t.subject, t.created_at, t.expires_at, t.revoked_at
from issued_token t
where t.project = $4 and (t.created_at, t.id) < ($1, $2) and t.expires_at > now()
order by t.created_at desc, t.id desc
limit $3;

-- The hour allows for clock differences: expiry is checked by the clock of each service. Projects take turns, so that one
-- that revokes more than the limit pushes out none but its own.
-- name: revoked_tokens
select t.id from (
    select q.id, q.expires_at, row_number() over (partition by q.project order by q.expires_at desc) as turn
    from issued_token q
    where q.revoked_at is not null and q.expires_at > now() - interval '1 hour'
        and ($1::text is null or q.project in ($1, 'projects/*'))
) t
order by t.turn, t.expires_at desc
limit $2;

-- name: delete_expired_tokens
delete from issued_token t where t.ctid = any (array(
    select q.ctid from issued_token q
    where q.expires_at < now() - interval '1 hour'
    order by q.expires_at limit $1 for update skip locked
))
returning 1;
