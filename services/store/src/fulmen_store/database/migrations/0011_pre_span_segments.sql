-- Chunks of spans that were moved into objects of the blob storage (docs/decisions/0049): of each only its place is kept here.
-- Ids are random, and name the objects: after a restore none is given twice.
create table span_segment (
    id bigint primary key check (id > 0),
    project_id int not null,
    -- That of the rollouts' ids.
    day date not null,
    -- 1: is being written, 2: holds spans, 3: nothing refers to it, and the object goes after `remove_at`.
    state smallint not null default 1 check (state between 1 and 3),
    size_bytes int not null default 0 check (size_bytes >= 0),
    -- Bytes of the chunks that are still referred to.
    live_bytes int not null default 0 check (live_bytes between 0 and size_bytes),
    claimed_at timestamptz not null default now(),
    -- When the first of its chunks was deleted.
    dead_since timestamptz,
    remove_at timestamptz,
    constraint span_segment_has_a_removal check ((state = 3) = (remove_at is not null))
);
-- One replica at a time writes spans of a project and day.
create unique index span_segment_claim on span_segment (project_id, day) where state = 1;
create index span_segment_removal on span_segment (remove_at) where state = 3;

-- The chunks of a rollout in a segment: they lie one after the other from `start_byte` on, in the order of `heads`, which
-- has 47 bytes for each (segments/extents.py).
create table span_extent (
    rollout_id uuid not null,
    segment_id bigint not null,
    start_byte int not null check (start_byte >= 0),
    heads bytea not null constraint span_extent_heads_are_whole check (length(heads) > 0 and length(heads) % 47 = 0),
    primary key (rollout_id, segment_id)
);
create index span_extent_by_segment on span_extent (segment_id);

-- Days before a date whose partition holds spans, or the pages of some that it held.
create function days_with_spans(before date) returns setof date language sql volatile as $$
    select d.day
    from partition_days('span_chunk') as d (day)
    cross join lateral (select to_regclass('span_chunk_' || to_char(d.day, 'YYYYMMDD')) as name) t
    where d.day < before
        and (pg_relation_size(t.name) > 0 or pg_indexes_size(t.name) > current_setting('block_size')::bigint)
$$;

-- Returns the disk of a day's partition if it has no rows; whether it did. Vacuum alone would keep the pages of its indexes.
create function truncate_empty_day(day date) returns boolean language plpgsql set lock_timeout = '200ms' as $$
declare
    partition constant text := 'span_chunk_' || to_char(day, 'YYYYMMDD');
    has_rows boolean;
begin
    if to_regclass(format('%I', partition)) is null then
        return false;
    end if;
    begin
        execute format('lock table only %I in access exclusive mode', partition);
    exception when lock_not_available then
        return false;
    end;
    execute format('select exists (select 1 from %I)', partition) into has_rows;
    if has_rows then
        return false;
    end if;
    execute format('truncate table only %I', partition);
    return true;
end
$$;
