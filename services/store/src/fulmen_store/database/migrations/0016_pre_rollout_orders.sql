-- Orders of lists (docs/decisions/0058): by reward and duration, which the row of an end has, and by tokens and cost. Entries of
-- other training runs are passed over within the index.
create index rollout_end_by_reward on rollout_end (project_id, reward, rollout_id) include (run_id) where reward is not null;
create index rollout_end_by_duration on rollout_end (project_id, duration_s, rollout_id) include (run_id)
    where duration_s is not null;

-- Sums of usage by rollout, written with those by attempt. For lists: they go with the rollout, those by attempt stay.
create table rollout_usage (
    rollout_id uuid primary key,
    project_id int not null,
    run_id int,
    prompt_token_count bigint not null,
    completion_token_count bigint not null,
    token_count bigint not null generated always as (prompt_token_count + completion_token_count) stored,
    cost_micros bigint not null
) with (fillfactor = 70);
insert into rollout_usage (rollout_id, project_id, run_id, prompt_token_count, completion_token_count, cost_micros)
select
    u.rollout_id, u.project_id, r.run_id, sum(u.prompt_token_count)::bigint, sum(u.completion_token_count)::bigint,
    sum(u.cost_micros)::bigint
from usage_attempt u
join rollout r on r.id = u.rollout_id
group by u.rollout_id, u.project_id, r.run_id;
create index rollout_usage_by_tokens on rollout_usage (project_id, token_count, rollout_id) include (run_id);
create index rollout_usage_by_cost on rollout_usage (project_id, cost_micros, rollout_id) include (run_id);

-- A message that is not stored in its row is read once, not once for each of its bytes.
alter function message_fields(bytea, int) rename to fields_of_message;
create function message_fields(message bytea, field int) returns setof bytea
language sql immutable strict parallel safe as $$ select fields_of_message(substring(message from 1), field) $$;

-- Bytes with the ASCII letters of texts in them as small ones.
create function small_letters(text_bytes bytea) returns bytea language sql immutable strict parallel safe as $$
    select decode(lower(encode(text_bytes, 'escape') collate "C"), 'escape')
$$;
