-- What people ordered runners to do: the last order of each kind, under the number of the last.
alter table runner_session add column order_number bigint not null default 0;
-- The last order that the runner has confirmed.
alter table runner_session add column done_order bigint not null default 0;
-- 0: the runner sizes them itself. Null: not ordered.
alter table runner_session add column ordered_slots int check (ordered_slots between 0 and 10000);
alter table runner_session add column drain_ordered boolean not null default false;
-- Null: the runner's own setting.
alter table runner_session add column drain_grace_s float8 check (drain_grace_s >= 0);
create index runner_session_ordered on runner_session (id) where order_number > done_order and ended_at is null;
