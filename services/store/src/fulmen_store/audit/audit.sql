-- columns: entry
--   id uuid, project text, action text, code text, reason text, actor text, role text, token_id text, request text,
--   trace_id text, left_out bigint, ended_at timestamptz

-- name: add_audit_entries
-- A second try after a lost answer adds nothing twice.
insert into audit_entry ({entry})
select {q.entry} from unnest({entry[1]}) as q ({entry})
on conflict (id) do nothing;

-- name: list_audit_entries
-- Of project $1, or of all; from id $2 on, below $3.
select {a.entry} from audit_entry a
where ($1::text is null or a.project = $1) and a.id >= $2 and a.id < $3
    and ($4::text is null or a.actor = $4)
    and ($5::text is null or $5 in (a.action, split_part(a.action, '/', 1), split_part(a.action, '/', 2)))
    and (not $6::boolean or a.code <> 'OK')
order by a.id desc limit $7;

-- name: delete_old_audit_entries
delete from audit_entry a where a.ctid = any (array(
    select q.ctid from audit_entry q
    where q.id < uuid7_bound(now() - interval '365 days')
    order by q.id limit $1 for update skip locked
))
returning 1;

-- name: delete_surplus_audit_entries
-- Of each project all but the newest.
delete from audit_entry a where a.ctid = any (array(
    select q.ctid from (select distinct e.project from audit_entry e) p
    cross join lateral (
        select r.ctid from audit_entry r where r.project = p.project order by r.id desc offset 100000 limit $1
    ) q
    limit $1
))
returning 1;
