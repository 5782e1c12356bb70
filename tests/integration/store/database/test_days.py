"""What a statement opens does not depend on how many days are kept.

PostgreSQL locks every partition that is in a plan, also those that it never reads: at a thousand days some callers at once
would need more locks than the server has.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest

from fulmen.ids import uuid7
from fulmen_store.database.database import Database
from fulmen_store.database.queries import SQL, is_by_day, of_days

DAYS = 60
TODAY = datetime.datetime.now(datetime.UTC).date()
EXPLAINED = re.compile(r"(--[^\n]*\n)*\s*\(?\s*(select|insert|update|delete|with)\b")
OPEN = """
select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'relation' and relation >= 16384
"""


async def test_no_statement_opens_more_tables_the_more_days_are_kept(connection: Any) -> None:
    before = await opened_by_statement(connection)
    await keep_days(connection, DAYS)
    after = await opened_by_statement(connection)
    assert len(before) > 150
    assert {name for name, _ in SQL.items()} - set(before) == {"make_taken", "take_xids", "drop_taken"}
    grown = {name: (before[name], after[name]) for name in before if after[name] != before[name]}
    assert not grown


async def test_a_statement_that_reads_by_day_is_not_run_without_days(database: Database) -> None:
    for name in (name for name, _ in SQL.items() if is_by_day(name)):
        with pytest.raises(KeyError, match="reads by day"):
            await database.fetch(name)
        async with database.transaction() as transaction:
            with pytest.raises(KeyError, match="reads by day"):
                await transaction.fetch(name)


async def test_a_statement_that_opens_every_day_is_noticed(connection: Any) -> None:
    every_day = "select q.chunk_id from span_chunk q where q.rollout_id = $1"
    before = await opened(connection, every_day)
    await keep_days(connection, DAYS)
    assert await opened(connection, every_day) >= before + DAYS


async def test_a_statement_opens_the_days_that_are_asked_for_and_no_others(connection: Any) -> None:
    await keep_days(connection, DAYS)
    now, day_ms = uuid7(), 86_400_000
    then = [uuid7(now.int // 2**80 - days * day_ms) for days in (10, 11, 30)]
    one, four = [await opened(connection, of_days("read_chunks", ids)) for ids in ([now], [now, *then])]
    # A partition and its key, of three days more.
    assert four - one == 6


async def keep_days(connection: Any, count: int) -> None:
    """Makes partitions of so many days before the first one."""
    for ago in range(2, count + 2):
        assert await connection.fetchval("select create_span_partition($1)", TODAY - datetime.timedelta(days=ago))


async def opened_by_statement(connection: Any) -> dict[str, int]:
    """Returns how many tables and indexes each statement of the store opens."""
    found = {}
    for name, text in SQL.items():
        if EXPLAINED.match(text):
            found[name] = await opened(connection, of_days(name, [uuid7()]) if is_by_day(name) else text)
    return found


async def opened(connection: Any, text: str) -> int:
    """Returns how many tables and indexes are in the plan that the store has of a statement, whatever its arguments are."""
    count = max(map(int, re.findall(r"\$(\d+)", text)), default=0)
    arguments = f"({', '.join(['null'] * count)})" if count else ""
    await connection.execute(f"prepare statement as {text}")
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(f"explain execute statement {arguments}")
        return int(await connection.fetchval(OPEN))
    finally:
        await transaction.rollback()
        await connection.execute("deallocate statement")
