-- Payloads outside the database, and how long a project's rollouts are kept.

-- How long final rollouts and their spans are kept; null: for ever.
alter table project add column if not exists retention interval;

-- blob: the SHA-256 of the payload if it lies in the blob storage; the payload here is empty then.
alter table span_chunk
    add column blob bytea,
    add column blob_size int,
    add constraint span_chunk_blob_is_whole check (
        (blob is null and blob_size is null)
        or (length(blob) = 32 and blob_size > 0 and length(payload) = 0)
    );

-- Days that have partitions of a table.
create function partition_days(parent text) returns setof date language sql stable as $$
    select to_date(right(c.relname, 8), 'YYYYMMDD')
    from pg_inherits i join pg_class c on c.oid = i.inhrelid
    where i.inhparent = to_regclass(parent) and c.relname ~ ('^' || parent || '_[0-9]{8}$')
$$;

-- Whether nobody needs the rollouts of a day any more: each project that has some is past its retention, counted from
-- the end of its last one, and none is live. A minute is added, because rows are looked at in order of transaction ids.
create function day_is_expired(day date) returns boolean language plpgsql stable as $$
declare
    low constant uuid := uuid7_bound(day::timestamp at time zone 'UTC');
    high constant uuid := uuid7_bound((day + 1)::timestamp at time zone 'UTC');
    p record;
    newest timestamptz;
begin
    if exists (select 1 from item i where i.id >= low and i.id < high) then
        return false;
    end if;
    for p in select q.id, q.retention from project q order by q.retention desc nulls first loop
        if exists (select 1 from rollout r where r.project_id = p.id and r.id >= low and r.id < high) then
            if p.retention is null or (day + 1)::timestamp at time zone 'UTC' + p.retention > now() then
                return false;
            end if;
            select e.ended_at into newest from rollout_end e
            where e.project_id = p.id and e.rollout_id >= low and e.rollout_id < high
            order by e.xid desc limit 1;
            if newest + p.retention + interval '1 minute' > now() then
                return false;
            end if;
        end if;
    end loop;
    return true;
end
$$;

-- Drops the partition of one day of one table if nobody needs the day any more; tells whether it did. `rollout` goes
-- first: everything else is reached through it. Nothing can be added to the day meanwhile, as the table is locked; who
-- holds it for longer than a second is not waited for.
create function drop_expired_partition(parent text, day date) returns boolean language plpgsql as $$
declare
    partition constant text := parent || '_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(format('%I', partition)) is null then
        return false;
    end if;
    perform set_config('lock_timeout', '1s', true);
    begin
        execute format('lock table only %I in access exclusive mode', parent);
        execute format('lock table %I in access exclusive mode', partition);
    exception when lock_not_available then
        return false;
    end;
    if not day_is_expired(day) then
        return false;
    end if;
    execute format('drop table %I', partition);
    return true;
end
$$;
