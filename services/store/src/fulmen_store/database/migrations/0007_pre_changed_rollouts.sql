-- Changes of live rollouts, paused queues, deleted projects, and fields of stored messages.

-- `request` is what holds, `original` what was asked for, by which a repeated creation is recognized; null: the same.
alter table rollout add column original bytea;

-- Grows when the priority of a live rollout changes: replicas then read the project's backlog again.
alter table project add column order_revision bigint not null default 0;

-- While a queue is paused, none of the project's rollouts is leased.
alter table project add column paused_at timestamptz;
alter table project add column pause_reason text not null default '' check (length(pause_reason) <= 256);

-- A deleted project does not exist for callers. Its row stays, so that no other project ever gets its name, under which other
-- services keep models and routes. `emptied_at` is when all else that belongs to it was removed.
alter table project add column deleted_at timestamptz;
alter table project add column emptied_at timestamptz;

-- The values of a field of a serialized protobuf message: of strings, bytes, messages and entries of maps. Ends silently where
-- the message is malformed.
create function message_fields(message bytea, field int) returns setof bytea
language plpgsql immutable strict parallel safe as $$
declare
    size constant int := octet_length(message);
    place int := 0;
    next_byte int;
    tag bigint;
    value bigint;
    shift int;
begin
    while place < size loop
        tag := 0;
        shift := 0;
        loop
            if place >= size or shift > 63 then
                return;
            end if;
            next_byte := get_byte(message, place);
            place := place + 1;
            tag := tag | ((next_byte & 127)::bigint << shift);
            exit when next_byte < 128;
            shift := shift + 7;
        end loop;
        value := case tag & 7 when 1 then 8 when 5 then 4 else 0 end;
        if tag & 7 in (0, 2) then
            shift := 0;
            loop
                if place >= size or shift > 63 then
                    return;
                end if;
                next_byte := get_byte(message, place);
                place := place + 1;
                value := value | ((next_byte & 127)::bigint << shift);
                exit when next_byte < 128;
                shift := shift + 7;
            end loop;
        elsif tag & 7 not in (1, 5) then
            return;
        end if;
        if tag & 7 <> 0 then
            if value < 0 or value > size - place then
                return;
            end if;
            if tag & 7 = 2 and tag >> 3 = field then
                return next substring(message from place + 1 for value::int);
            end if;
            place := place + value::int;
        end if;
    end loop;
end
$$;
