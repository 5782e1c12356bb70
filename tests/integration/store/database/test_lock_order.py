"""Locks of rows are taken in one order: no two statements wait for each other, whatever the order of their callers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from uuid import UUID

import asyncpg
import pytest

from fulmen.ids import uuid7
from fulmen_store.database.queries import SQL, arguments
from fulmen_store.rollouts.requests import NewRollout

LIMIT_S = 60
IDS = [UUID(int=number) for number in (1, 2, 3)]
SESSION, HEDGE = uuid7(), uuid7()
ITEMS = """
insert into item (
    id, project_id, sort_priority, group_size, max_attempts, retry_mask, backoff_ms, timeout_ms, run_at, session, leased_at,
    epoch, cancel_requested, cancel_by, hedge_session, hedge_epoch, hedge_leased_at
)
select id, 1, 0, 1, 3, 0, 0, 1000, now(), $2, now(), 1, true, now() + interval '1 hour', $3::uuid,
    case when $3::uuid is not null then 2 end, case when $3::uuid is not null then now() end
from unnest($1::uuid[]) id
"""
SESSIONS = """
insert into runner_session (id, subject, project, host, info, lease_until)
select id, 's', 'projects/*', 'h', '', now() + interval '1 hour' from unnest($1::uuid[]) id
"""
# Statements that wait for locks of several rows, by twos: a row that both want is held until both wait.
PAIRS = [
    ("end_attempts", "end_attempts"),
    ("cancel_rollouts", "end_attempts"),
    ("mend_leases", "end_attempts"),
    ("end_hedged_attempts", "end_hedged_attempts"),
    ("renew_sessions", "renew_sessions"),
    ("end_sessions", "renew_sessions"),
    ("mend_sessions", "renew_sessions"),
    ("create_rollouts", "create_rollouts"),
]


def values(name: str, ids: list[UUID]) -> tuple[object, ...]:
    """Returns the arguments of a statement for rows in an order."""
    three = len(ids)
    lease = (ids, [SESSION] * three, [1] * three, [True] * three)
    end = ([2] * three, [0] * three, [4] * three)
    match name:
        case "end_attempts":
            rest = ([0.0] * three, [1] * three, [b""] * three, [1] * three, [0] * three, [None] * three, [None] * three)
            return (*lease, *end, *rest, [None] * three, 3)
        case "end_hedged_attempts":
            return (*lease, *end, [b""] * three, [1] * three, *[[None] * three] * 3)
        case "cancel_rollouts":
            return (ids, 30.0)
        case "renew_sessions":
            return (ids, 60.0, [True] * three, [None] * three, [0] * three, [0] * three)
        case "end_sessions":
            return (ids,)
        case "create_rollouts":
            rollouts = [NewRollout(request=b"", id=each, project_id=1) for each in ids]
            return ([], [], [], *arguments("rollouts/rollouts.sql", "rollout+item+derived", rollouts, as_text=True))
        case _:
            return (1.0,)


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_callers_that_name_rows_in_opposite_orders_do_not_stop_each_other(
    connection: asyncpg.Connection, database_url: str, first: str, second: str
) -> None:
    hedge = HEDGE if first == "end_hedged_attempts" else None
    if first != "create_rollouts":
        await connection.execute(SESSIONS, IDS)
        await connection.execute(ITEMS, IDS, SESSION, hedge)
    async with AsyncExitStack() as stack:
        await both_wait(connection, [await opened(stack, database_url) for _ in range(3)], first, second)


async def both_wait(
    connection: asyncpg.Connection, connections: list[asyncpg.Connection], first: str, second: str
) -> None:
    """Lets two statements wait for a row that is held, then for each other's rows if they do not take them in one order."""
    one, other, holder = connections
    transaction = holder.transaction()
    await transaction.start()
    if first == "create_rollouts":
        await holder.execute(ITEMS, IDS[1:2], SESSION, None)
    else:
        table = "runner_session" if "session" in first else "item"
        await holder.execute(f"select from {table} where id = $1 for update", IDS[1])
    forward = asyncio.create_task(one.fetch(SQL[first], *values(first, IDS)))
    await until_waiting(connection, 1)
    backward = asyncio.create_task(other.fetch(SQL[second], *values(second, IDS[::-1])))
    await until_waiting(connection, 2)
    await transaction.rollback()
    async with asyncio.timeout(LIMIT_S):
        ends = await asyncio.gather(forward, backward, return_exceptions=True)
    # Of two creations of the same names one fails.
    allowed = list | asyncpg.UniqueViolationError if first == "create_rollouts" else list
    assert [end for end in ends if not isinstance(end, allowed)] == []


async def opened(stack: AsyncExitStack, database_url: str) -> asyncpg.Connection:
    """Opens a connection that is closed with the stack."""
    connection = await asyncpg.connect(database_url)
    stack.push_async_callback(connection.close)
    return connection


async def until_waiting(connection: asyncpg.Connection, count: int) -> None:
    """Waits until so many connections to this database wait for a lock."""
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with asyncio.timeout(LIMIT_S):
        while await connection.fetchval(waiting) < count:  # noqa: ASYNC110  # of a server
            await asyncio.sleep(0.01)
