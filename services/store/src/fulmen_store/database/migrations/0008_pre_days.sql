-- Partitions by day are kept for chunks of spans alone (docs/decisions/0047). The other tables are read by project, by run or in
-- the order of ends, which opened every day that is kept. Their rows are copied, about a million rollouts in a minute.
lock table rollout, attempt, rollout_end, span_chunk in access exclusive mode;

create table rollout_whole (like rollout including defaults including constraints including storage);
insert into rollout_whole select * from rollout;
drop table rollout;
alter table rollout_whole rename to rollout;
alter table rollout add primary key (id);
create index rollout_by_project on rollout (project_id, id);
create index rollout_by_run on rollout (project_id, run_id, id);

create table attempt_whole (like attempt including defaults including constraints including storage);
insert into attempt_whole select * from attempt;
drop table attempt;
alter table attempt_whole rename to attempt;
alter table attempt add primary key (rollout_id, number);

create table rollout_end_whole (like rollout_end including defaults including constraints including storage);
insert into rollout_end_whole select * from rollout_end;
drop table rollout_end;
alter table rollout_end_whole rename to rollout_end;
alter table rollout_end add primary key (rollout_id);
create index rollout_end_feed on rollout_end (project_id, xid, rollout_id);
create index rollout_end_group on rollout_end (group_key, xid, rollout_id) where group_key is not null;
create index rollout_end_dead on rollout_end (project_id, rollout_id) where state = 5;

-- The day of a UUIDv7.
create function uuid7_day(id uuid) returns date language sql immutable strict parallel safe as $$
    select (
        to_timestamp(('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint / 1000.0) at time zone 'UTC'
    )::date
$$;

-- Creates the partition of a day; returns whether it is there. Hinders nobody and waits for no reader, writer or dump: a table
-- is created on its own, empty, and attached under SHARE UPDATE EXCLUSIVE. There is no default partition, which would be
-- locked against readers and searched.
create function create_span_partition(day date) returns boolean language plpgsql set lock_timeout = '200ms' as $$
declare
    partition constant text := 'span_chunk_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(partition) is null then
        execute format('create table %I (like span_chunk including all)', partition);
        execute format(
            'alter table span_chunk attach partition %I for values from (%L) to (%L)', partition,
            uuid7_bound(day::timestamp at time zone 'UTC'), uuid7_bound((day + 1)::timestamp at time zone 'UTC')
        );
    end if;
    return true;
exception
    when lock_not_available then
        return false;
    when duplicate_table or duplicate_object or unique_violation then
        -- Another replica was first.
        return to_regclass(partition) is not null;
end
$$;

-- What stores of the last version call.
create or replace procedure create_day_partitions(day date) language plpgsql as $$
begin
    perform create_span_partition(day);
end
$$;

-- Chunks of days that had no partition go into one of their own.
do $$
declare
    day date;
begin
    alter table span_chunk detach partition span_chunk_default;
    for day in select distinct uuid7_day(c.rollout_id) from span_chunk_default c loop
        perform create_span_partition(day);
    end loop;
    insert into span_chunk select * from span_chunk_default;
    drop table span_chunk_default;
end
$$;

-- Whether the rollouts of a day have expired: none is live, and each project that has some is past its retention, counted from
-- the end of each. A minute is added, because rows are read in order of transaction ids.
create or replace function day_is_expired(day date) returns boolean language plpgsql stable as $$
declare
    low constant uuid := uuid7_bound(day::timestamp at time zone 'UTC');
    high constant uuid := uuid7_bound((day + 1)::timestamp at time zone 'UTC');
    q record;
begin
    if exists (select 1 from item i where i.id >= low and i.id < high) then
        return false;
    end if;
    for q in select p.id, p.retention from project p order by p.retention desc nulls first loop
        exit when (day + 1)::timestamp at time zone 'UTC' + q.retention <= now();
        if exists (select 1 from rollout r where r.project_id = q.id and r.id >= low and r.id < high) then
            return false;
        end if;
    end loop;
    return not exists (
        select 1 from rollout_end e
        -- `+ 0` prevents a plan that reads all ends of a project.
        join project p on p.id = e.project_id + 0
        where e.rollout_id >= low and e.rollout_id < high and e.ended_at + p.retention + interval '1 minute' > now()
    );
end
$$;

-- Drops the partition of one day if the day has expired; returns whether it did. The table is locked, so that nothing can be
-- added to the day meanwhile; the lock is waited for only briefly, since whoever adds spans waits behind.
create or replace function drop_expired_partition(parent text, day date) returns boolean
language plpgsql set lock_timeout = '200ms' as $$
declare
    partition constant text := parent || '_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(format('%I', partition)) is null then
        return false;
    end if;
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
