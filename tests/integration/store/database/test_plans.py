"""The plans of hot statements: index probes whatever the statistics say, however long the backlog is.

A textbook statement that was prepared on an empty table costs 10 ms per row when it has grown, and a look that drops
what it does not want costs as much as everything that waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from fulmen.ids import uuid7
from fulmen_store.database.queries import SQL
from tests.support.store.plans import explained, nodes_of

WAITING = 30_000
LEASED = 200
SESSIONS = 20
ENDED = 20_000
ASKED = 100
USAGE_ROWS, RUNS, MODELS = 20_000, 100, 4
SCHEDULES, RUNS_KEPT = 500, 100
IDLE_RUN = 7
RESPONSES = 20_000
LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
DROPPED = ("Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck")
OTHER_SESSION = uuid7()
SESSION_IDS = [uuid7() for _ in range(SESSIONS)]
GROUPS = [uuid7() for _ in range(10)]
SPANNED = [uuid7() for _ in range(5000)]
SEGMENTS, EXTENTS = 50, 20_000
# Waiting, leased, ended and hedged rows, in one project; the waiting ones of five priorities. Uses of a version, ended
# sessions, and usage of several models in 100 training runs.
GROW = (
    """
    insert into item (id, project_id, sort_priority, run_id, group_size, max_attempts, retry_mask, backoff_ms, timeout_ms, run_at)
    select gen_random_uuid(), 1, n % 5, n % 3, 1, 3, 24, 0, 1000, now() from generate_series(1, $1::int) n
    """,
    """
    insert into item (
        id, project_id, sort_priority, group_size, max_attempts, retry_mask, backoff_ms, timeout_ms, run_at, session, leased_at,
        epoch, hedged
    )
    select gen_random_uuid(), 1, n % 5, 1, 3, 24, 0, 1000, now(), s.id, now() - interval '1 minute', 1, n <= 100
    from generate_series(1, $1::int) n
    cross join lateral (select q.id from runner_session q order by q.id offset n % $2 limit 1) s
    """,
    """
    insert into rollout_end (rollout_id, project_id, run_id, group_key, group_size, state, failure_kind, reward, duration_s)
    select gen_random_uuid(), 1, n % 3, case when n <= 100 then ($2::uuid[])[1 + n % 10] end,
        case when n <= 100 then 10 else 1 end, 4, 0, n % 2, n % 7
    from generate_series(1, $1::int) n
    """,
    "insert into resource (project_id, name, kind, last_version) values (1, 'agent.a', 'agent', 1)",
    """
    insert into resource_version (resource_id, version, content_type, content, sha256, parent, metadata)
    values (1, 1, '', '', sha256(''), '', '{}')
    """,
    "insert into resource_use select 1, 1, id from item",
    """
    insert into runner_session (id, subject, project, host, info, lease_until, ended_at)
    select gen_random_uuid(), 's', 'projects/*', 'h', '', now(), now() - interval '100 days' from generate_series(1, 5000)
    """,
    """
    insert into live_count (project_id, run_id, sort_priority, live)
    select project_id, run_id, sort_priority, 1 from item
    """,
    """
    insert into rollout (id, project_id, run_id, sort_priority, mode, request)
    select id, project_id, run_id, sort_priority, 1, '' from item
    """,
    """
    insert into request_log
    select 1, 'm', 'r' || n, '', now() - interval '2 days' from generate_series(1, 20000) n
    """,
    """
    insert into usage_attempt
    select ('00000000-0000-0000-0000-' || lpad(to_hex(n / $2), 12, '0'))::uuid, 1, 'm' || n % $2, 'b', 1, n / $2 % $3,
        1, 0, 1, 0, 1, 0
    from generate_series(0, $1 - 1) n
    """,
    """
    insert into usage_minute
    select 1, date_trunc('minute', now()) - n / $2 * interval '1 minute', 'm' || n % $2, 'b', 1, 0, 1, 0, 1, 0
    from generate_series(0, $1 - 1) n
    """,
    # Each continues the one before it.
    """
    insert into stored_response
    select ('00000000-0000-0000-0000-' || lpad(to_hex(n), 12, '0'))::uuid, 1, '',
        ('00000000-0000-0000-0000-' || lpad(to_hex(n - 1), 12, '0'))::uuid, n, n * 1000, '', '', 1000,
        now() + (n - $1 / 2) * interval '1 minute'
    from generate_series(1, $1) n
    """,
    # Accounts of leased and other attempts.
    """
    insert into capture_account
    select coalesce(i.id, gen_random_uuid()), 1, 1, 'one', 'projects/*', false, 1, 0, 0, 0, 0, 0
    from generate_series(1, $1::int) n
    left join (select q.id, row_number() over () as n from item q where q.session is not null) i using (n)
    """,
    # The first of the schedules is due, and of the runs of each the last one is starting.
    """
    insert into schedule (
        project_id, name, spec, cron, time_zone, overlap_policy, missed_policy, rollout_count, next_due
    )
    select 1, 's' || n, '', '* * * * *', 'UTC', 1, 1, 1, now() + (n - 1) * interval '1 hour'
    from generate_series(1, $1::int) n
    """,
    """
    insert into schedule_run (schedule_id, due_at, state, retry_at)
    select s.id, now() - n * interval '1 minute', case n when 1 then 1 else 2 end, case n when 1 then now() end
    from schedule s cross join generate_series(1, $1::int) n
    """,
)
GROW_USAGE = """
insert into rollout_usage (rollout_id, project_id, run_id, prompt_token_count, completion_token_count, cost_micros)
select e.rollout_id, 1, 1, hashint4(e.run_id) % 5, 5, e.run_id from rollout_end e
"""
# Rollouts of another project that have ended, with a chunk each, and others whose spans are in segments.
GROW_SPANS = (
    """
    insert into rollout_end (rollout_id, project_id, group_size, state, failure_kind)
    select id, 2, 1, 4, 0 from unnest($1::uuid[]) id
    """,
    """
    insert into span_chunk (rollout_id, attempt, chunk_id, span_count, codec, start_ns, end_ns, payload)
    select id, 1, id, 1, 2, 0, 0, 'x' from unnest($1::uuid[]) id
    """,
    """
    insert into span_extent
    select coalesce(($1::uuid[])[n], gen_random_uuid()), 1 + n % 50, 0, decode(repeat('00', 47), 'hex')
    from generate_series(1, 20000) n
    """,
    """
    insert into span_segment (id, project_id, day, state, size_bytes, live_bytes, remove_at)
    select n, 1, current_date, case when n <= 50 then 2 else 3 end, 1, 1, case when n > 50 then now() - interval '1 day' end
    from generate_series(1, 5000) n where $1::uuid[] is not null
    """,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hot:
    """A statement that runs all the time.

    Attributes:
        arguments: with which it is run.
        items: how many rows of `item` it may look at.
        ends: how many rows of `rollout_end` it may look at.
        others: how many rows of other tables it may look at; at least one.
        index: an index of `item` that it has to use.
    """

    arguments: tuple[object, ...]
    items: int = 0
    ends: int = 0
    others: Mapping[str, int] = field(default_factory=dict)
    index: str = ""


STORED_RESPONSES = {
    "stored_responses": Hot(arguments=(1, UUID(int=RESPONSES), "", ASKED, 10**9), others={"stored_response": ASKED}),
    "remove_stored_response": Hot(arguments=(1, UUID(int=RESPONSES), ""), others={"stored_response": 1}),
    # At most 1,000 are looked at, and those that go are found by their ids.
    "remove_oldest_stored_responses": Hot(arguments=(1, ASKED * 1000), others={"stored_response": 1000 + 2 * ASKED}),
    "remove_expired_stored_responses": Hot(arguments=(1, ASKED), others={"stored_response": 3 * ASKED}),
}


def span_statements() -> dict[str, Hot]:
    """Names the statements that move spans into segments, and read and remove them."""
    return {
        "movable_rollouts": Hot(arguments=(LOWEST, -60.0, ASKED), ends=3 * ASKED, others={"span_chunk": 3 * ASKED}),
        "movable_chunks": Hot(arguments=(SPANNED[:ASKED], 1000), others={"span_chunk": ASKED}),
        "move_chunks": Hot(arguments=(SPANNED[:ASKED], [1] * ASKED, SPANNED[:ASKED]), others={"span_chunk": 2 * ASKED}),
        "extents_of_rollouts": Hot(arguments=(SPANNED[:ASKED],), others={"span_extent": ASKED}),
        "remove_extents": Hot(arguments=(SPANNED[:ASKED],), others={"span_extent": 2 * ASKED}),
        "take_extents": Hot(
            arguments=(SPANNED[:ASKED], [1 + (n + 1) % SEGMENTS for n in range(ASKED)]),
            others={"span_extent": 2 * ASKED},
        ),
        "extents_of_segments": Hot(arguments=([7],), others={"span_extent": EXTENTS // SEGMENTS}),
        "shrink_segments": Hot(arguments=([1, 2], [1, 1]), others={"span_segment": 6}),
        "removable_segments": Hot(arguments=(ASKED,), others={"span_segment": ASKED}),
        "release_claims": Hot(arguments=(None,)),
    }


def orders_of_lists() -> dict[str, Hot]:
    """Names the statements that walk an order, from its beginning."""
    found = {}
    for figure, table, bound in (
        ("reward", "rollout_end", "infinity"), ("duration", "rollout_end", "infinity"),
        ("token_count", "rollout_usage", 2**62), ("cost_micros", "rollout_usage", 2**62),
    ):  # fmt: skip
        # Ascending, three probes find one.
        for direction, most in (("descending", ASKED), ("ascending", 3 * ASKED)):
            start = f"-{bound}" if direction == "ascending" else bound
            in_table = {"ends": most} if table == "rollout_end" else {"others": {table: most}}
            found[f"{figure}_{direction}"] = Hot(arguments=(1, start, HIGHEST, ASKED, None), **in_table)
    return found


HOT_OF_SCHEDULES = {
    "due_schedules": Hot(arguments=(ASKED,), others={"schedule": 1}),
    "continue_schedule_runs": Hot(arguments=(10.0, ASKED), others={"schedule_run": 3 * ASKED}),
    "list_schedule_runs": Hot(arguments=(1, 20), others={"schedule_run": 20}),
    "remove_old_schedule_runs": Hot(arguments=(1, RUNS_KEPT), others={"schedule_run": 3 * RUNS_KEPT}),
    "schedule_is_running": Hot(arguments=(1,), others={"schedule_run": 2}),
}


def hot_statements(waiting: list[UUID], leased: list[UUID], hedged: list[UUID]) -> dict[str, Hot]:
    """Names every hot statement with arguments that find something."""
    count = len(leased)
    others = [OTHER_SESSION] * count
    ends = ([1] * count, [False] * count, [2] * count, [0] * count, [4] * count)
    own = SESSION_IDS
    return STORED_RESPONSES | {
        "claim_rollouts": Hot(arguments=(waiting, others), items=3 * ASKED, index="item_pkey"),
        "held_leases": Hot(arguments=(leased,), items=ASKED, index="item_pkey"),
        "cancel_rollouts": Hot(arguments=(waiting, 30.0), items=4 * ASKED, index="item_pkey"),
        "end_attempts": Hot(
            arguments=(
                leased,
                others,
                *ends,
                [0.0] * count,
                [1] * count,
                [b""] * count,
                [1] * count,
                [0] * count,
                [0.5] * count,
                [None] * count,
                [None] * count,
                3,
            ),
            items=4 * ASKED,
            index="item_pkey",
        ),
        "bound_attempts": Hot(
            arguments=(leased, others, [1] * count, [1000] * count), items=4 * ASKED, index="item_pkey"
        ),
        "claim_hedges": Hot(arguments=(hedged, others, [0.0] * count), items=3 * ASKED, index="item_pkey"),
        "end_hedged_attempts": Hot(
            arguments=(hedged, others, *ends, [b""] * count, [1] * count, [0.5] * count, *[[None] * count] * 2),
            items=4 * ASKED,
            index="item_pkey",
        ),
        "report_progress": Hot(
            arguments=(leased, others, [1] * count, [b""] * count), items=3 * ASKED, index="item_pkey"
        ),
        "session_leases": Hot(arguments=(own,), items=LEASED, index="item_leased"),
        "orphaned_leases": Hot(arguments=(1000,), items=LEASED, index="item_leased"),
        "overdue_attempts": Hot(arguments=(30.0, 1000, 0.0, 0.0, time.time(), 30.0), items=LEASED, index="item_leased"),
        "fail_overdue_rollouts": Hot(arguments=(1000,), index="item_by_deadline"),
        "hedgeable_attempts": Hot(arguments=([1], 50), items=LEASED, index="item_hedgeable"),
        "refill_queue": Hot(arguments=(1, -200, LOWEST, 2000), items=2000 + LEASED, index="item_in_order"),
        "oldest_of_each_priority": Hot(arguments=(1, 100), items=5 * (100 + 2) + LEASED, index="item_in_order"),
        "running_room": Hot(arguments=(1,), items=LEASED, index="item_leased"),
        "count_queued": Hot(arguments=(1,), items=LEASED, index="item_leased"),
        "count_by_priority": Hot(arguments=(1, None), items=5 * (1000 + LEASED) + LEASED, index="item_leased"),
        "count_by_priority of a run": Hot(arguments=(1, 1), items=5 * (1000 + LEASED) + LEASED, index="item_leased"),
        "count_demand": Hot(arguments=(), items=LEASED, index="item_leased"),
        "live_rollouts": Hot(arguments=(1, -200, LOWEST, ASKED), items=5 * ASKED, index="item_in_order"),
        "live_rollouts_of_run": Hot(
            arguments=(1, 1, HIGHEST, ASKED), items=ASKED, others={"rollout": ASKED}, index="item_pkey"
        ),
        # Nothing of what waits in the project, or has ended there, is of these runs.
        "live_rollouts_of_run of a run without any": Hot(arguments=(1, IDLE_RUN, HIGHEST, ASKED), index="item_pkey"),
        "feed_news": Hot(arguments=([1], [0], ASKED), ends=ASKED),
        "delete_expired_requests": Hot(arguments=(ASKED,), others={"request_log": 3 * ASKED}),
        "delete_ended_sessions": Hot(arguments=(ASKED,), others={"runner_session": 3 * ASKED}),
        "scan_project_feed": Hot(arguments=(1, 0, LOWEST, ASKED), ends=20 * ASKED),
        "scan_run_feed": Hot(arguments=(1, 0, LOWEST, ASKED, 1), ends=20 * ASKED),
        "scan_run_feed of a run without ends": Hot(arguments=(1, 0, LOWEST, ASKED, IDLE_RUN), ends=0),
        "scan_group_feed": Hot(arguments=(1, 0, LOWEST, ASKED, GROUPS[0]), ends=20 * ASKED),
        "scan_changes": Hot(arguments=(1, 0, LOWEST, ASKED), items=ASKED + LEASED, ends=ASKED, index="item_changed"),
        "group_members": Hot(arguments=(GROUPS,), ends=ASKED),
        "get_rollouts": Hot(arguments=(leased, True, True, 2**62), items=ASKED),
        "get_attempts": Hot(arguments=(leased, 2**22)),
        "get_printed": Hot(arguments=(leased[0],)),
        "check_attempts": Hot(arguments=(leased, [1] * count), items=ASKED),
        "renew_sessions": Hot(
            arguments=(own, 60, [True] * SESSIONS, [None] * SESSIONS, [0] * SESSIONS, [0] * SESSIONS),
            others={"runner_session": 3 * SESSIONS},
        ),
        "list_runners": Hot(
            arguments=(LOWEST, 51, None, False),
            items=LEASED,
            others={"runner_session": 3 * SESSIONS},
            index="item_leased",
        ),
        "delete_ended_uses": Hot(arguments=(0, 0, LOWEST, ASKED), items=3 * ASKED, others={"resource_use": 3 * ASKED}),
        "delete_ended_uses_of_version": Hot(
            arguments=(1, 1, ASKED), items=3 * ASKED, others={"resource_use": 3 * ASKED}
        ),
        "capture_totals": Hot(
            arguments=(leased, [1] * count, [1] * count, "other"), items=ASKED, others={"capture_account": ASKED}
        ),
        "ended_rows": Hot(arguments=(leased, others)),
        "attempt_tokens": Hot(arguments=([UUID(int=7)], [1], ["projects/default"]), others={"usage_attempt": MODELS}),
        "usage_by_attempt": Hot(
            arguments=(1, None, UUID(int=7), UUID(int=7), 5, None, 10), others={"usage_attempt": MODELS}
        ),
        "usage_by_attempt of a run": Hot(
            arguments=(1, 5, LOWEST, HIGHEST, 4, None, 10), others={"usage_attempt": USAGE_ROWS // RUNS}
        ),
        "usage_by_minute": Hot(
            arguments=(1, datetime.now(UTC) - timedelta(minutes=2), None, 1, None, 10),
            others={"usage_minute": 4 * MODELS},
        ),
        "resume_session": Hot(arguments=(own[0], 60, "tests", "projects/*")),
        "end_sessions": Hot(arguments=(own[:5],)),
        "end_expired_sessions": Hot(arguments=(time.time(), 30.0)),
        **span_statements(),
        **HOT_OF_SCHEDULES,
        **orders_of_lists(),
    }


@pytest.mark.parametrize("all_leased", [False, True], ids=["on empty tables", "when all was leased"])
async def test_hot_statements_stay_probes_whenever_their_plans_were_made(connection: Any, all_leased: bool) -> None:
    some = [uuid7() for _ in range(ASKED)]
    await _start(connection)
    if all_leased:
        # The statistics then say that no rollout ever waits.
        await connection.execute(GROW[1], LEASED, SESSIONS)
        await connection.execute("analyze")
    for name, hot in hot_statements(some, some, some).items():
        if " " not in name:
            await connection.execute(f"prepare {name} as {SQL[name]}")
        await explained(connection, name, hot.arguments)
    await _grow(connection, leased=not all_leased)
    statements = hot_statements(
        await _ids(connection, "session is null"), await _ids(connection, "session is not null and not hedged"),
        await _ids(connection, "hedged"),
    )  # fmt: skip
    problems = await _problems(connection, statements)
    # The same with plans that know how large the tables are.
    await connection.execute("analyze")
    problems += await _problems(connection, statements)
    assert not problems, "\n\n".join(problems)


async def test_a_plan_that_looks_through_the_backlog_is_noticed(connection: Any) -> None:
    await _start(connection)
    await _grow(connection)
    await connection.execute(
        "prepare through as select i.id from item i where i.run_id = $1 and i.session is null limit $2"
    )
    hot = Hot(arguments=(IDLE_RUN, ASKED), items=ASKED)
    plan = await explained(connection, "through", hot.arguments)
    assert list(_broken(plan, hot))


async def test_old_groups_are_found_by_block_ranges(connection: Any) -> None:
    await connection.execute(
        "insert into rollout_group (project_id, group_key, size, created, touched_at)"
        " select 1, gen_random_uuid(), 2, 1, now() - interval '1 minute' * (30000 - n) from generate_series(1, 30000) n"
    )
    await connection.execute("vacuum analyze rollout_group")
    await connection.execute(f"prepare remove_groups as {SQL['remove_groups']}")
    async with connection.transaction():
        await connection.execute(SQL["allow_bitmaps"])
        plan = await explained(connection, "remove_groups", (1, ASKED))
    assert "rollout_group_by_age" in {node.get("Index Name") for node in nodes_of(plan)}


async def _problems(connection: Any, statements: dict[str, Hot]) -> list[str]:
    found = []
    for name, hot in statements.items():
        plan = await explained(connection, name, hot.arguments)
        found += [f"{name}: {problem}\n{json.dumps(plan)}" for problem in _broken(plan, hot)]
    return found


def _broken(plan: dict[str, Any], hot: Hot) -> Iterator[str]:
    nodes = list(nodes_of(plan))
    for relation, most in (("item", hot.items), ("rollout_end", hot.ends), *hot.others.items()):
        seen = 0.0
        for node in nodes:
            if not node.get("Relation Name", "").startswith(relation):
                continue
            if node["Node Type"] == "Seq Scan":
                yield f"reads all of {relation}"
            if node["Node Type"] != "ModifyTable":
                looked = sum(node.get(key, 0) for key in ("Actual Rows", *DROPPED))
                seen += looked * node["Actual Loops"]
        if seen > most:
            yield f"looks at {seen:.0f} rows of {relation}, {most} are enough"
        if relation in hot.others and not seen:
            yield f"finds nothing in {relation}"
    if hot.index and all(node.get("Index Name") != hot.index for node in nodes):
        yield f"does not use {hot.index}"


async def _start(connection: Any) -> None:
    await connection.execute("select create_span_partition((now() at time zone 'UTC')::date)")
    await connection.execute("update project set max_running = 1000, max_queued = $1 where id = 1", ASKED)
    await connection.executemany(
        "insert into runner_session (id, subject, project, host, info, lease_until)"
        " values ($1, 'tests', 'projects/*', 'host', '', now() + interval '1 hour')",
        [(one,) for one in SESSION_IDS],
    )


async def _grow(connection: Any, *, leased: bool = True) -> None:
    await connection.execute(GROW[0], WAITING)
    if leased:
        await connection.execute(GROW[1], LEASED, SESSIONS)
    await connection.execute(GROW[2], ENDED, GROUPS)
    await connection.execute(GROW_USAGE)
    for statement in GROW[3:10]:
        await connection.execute(statement)
    await connection.execute(GROW[10], USAGE_ROWS, MODELS, RUNS)
    await connection.execute(GROW[11], USAGE_ROWS, MODELS)
    await connection.execute(GROW[12], RESPONSES)
    for statement in GROW_SPANS:
        await connection.execute(statement, SPANNED)
    await connection.execute(GROW[13], USAGE_ROWS)
    await connection.execute(GROW[14], SCHEDULES)
    await connection.execute(GROW[15], RUNS_KEPT + 20)


async def _ids(connection: Any, condition: str) -> list[UUID]:
    rows = await connection.fetch(f"select id from item where {condition} limit {ASKED}")
    assert len(rows) == ASKED
    return [row["id"] for row in rows]
