-- A day's table and the TOAST table of its large values are locked apart: a vacuum may hold the second alone. Whatever is locked,
-- a day is left for the next pass.
create or replace function truncate_empty_day(day date) returns boolean language plpgsql set lock_timeout = '200ms' as $$
declare
    partition constant text := 'span_chunk_' || to_char(day, 'YYYYMMDD');
    has_rows boolean;
begin
    if to_regclass(format('%I', partition)) is null then
        return false;
    end if;
    execute format('lock table only %I in access exclusive mode', partition);
    execute format('select exists (select 1 from %I)', partition) into has_rows;
    if has_rows then
        return false;
    end if;
    execute format('truncate table only %I', partition);
    return true;
exception when lock_not_available then
    return false;
end
$$;

create or replace function drop_expired_partition(parent text, day date) returns boolean
language plpgsql set lock_timeout = '200ms' as $$
declare
    partition constant text := parent || '_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass(format('%I', partition)) is null then
        return false;
    end if;
    execute format('lock table only %I in access exclusive mode', parent);
    execute format('lock table %I in access exclusive mode', partition);
    if not day_is_expired(day) then
        return false;
    end if;
    execute format('drop table %I', partition);
    return true;
exception when lock_not_available then
    return false;
end
$$;
