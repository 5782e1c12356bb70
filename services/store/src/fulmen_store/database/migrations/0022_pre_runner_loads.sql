-- Loads that runners reported, the first of each minute, of the last two hours at most; as in `load`, opaque here. They end
-- with the session.
alter table runner_session add column load_minutes timestamptz[] not null default '{}';
alter table runner_session add column loads bytea[] not null default '{}' check (cardinality(loads) = cardinality(load_minutes));
-- The last of the minutes: read at every renewal, which must not unpack the arrays.
alter table runner_session add column load_minute timestamptz;
