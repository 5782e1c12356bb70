-- Keeps the server's transaction counter ahead of the stored numbers; see migrations.py.

-- name: newest_stored_xid
select coalesce(max(newest), 0) from (
    select (
        select e.xid::text::bigint from rollout_end e where e.project_id = p.id order by e.xid desc limit 1
    ) as newest
    from project p
    union all (select v.xid::text::bigint from resource_version v order by v.xid desc limit 1)
    union all (select a.xid::text::bigint from resource_alias a order by a.xid desc limit 1)
    union all (select m.xid::text::bigint from resource_alias_move m order by m.xid desc limit 1)
) as found;

-- name: next_xid
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: make_taken
create temporary table taken (number int) on commit delete rows;

-- name: take_xids
-- Every block with a handler is a subtransaction; one that writes consumes a number.
do $$ begin
    for i in 1..{count} loop
        begin
            insert into taken values (1);
        exception when others then raise;
        end;
    end loop;
end $$;

-- name: drop_taken
drop table taken;
