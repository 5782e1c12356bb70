"""Days that are kept: what PostgreSQL's CPU of the hot statements is at a thousand days, beside a database of today alone.

Two databases of one server have the same rows of today, and the second one rollouts, attempts, ends and spans of every day
before. The store's own tables run their statements on each in turn. CPU is that of the connection's process, which other work
on the machine hardly changes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg

from benchmarks.store.stand import Bench
from fulmen.ids import DEFAULT_PROJECT, uuid7, uuid7s
from fulmen_store.database.database import Database, connect
from fulmen_store.database.migrations import migrate
from fulmen_store.leases.table import PgLeaseTable
from fulmen_store.projects.names import ProjectNames
from fulmen_store.retention.retention import Maintenance
from fulmen_store.retention.table import UpkeepTable
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.lists import RolloutLists
from fulmen_store.rollouts.table import FeedTable, RolloutTable
from fulmen_store.spans.chunks import Chunk, NewChunk
from fulmen_store.spans.table import SpanParent, SpanTable

PROJECT = 1
WAITING = ENDED = 2048
BATCH = 64
CHUNKS = 8
PAGE = 50
FEED_ROWS = 512
CALLS = 200
ROUNDS = 25
REQUEST = b"x" * 400
REPORT = b"y" * 100
PAYLOAD = b"z" * 1000
DAY_S = 86_400
GOAL = 1.2


@dataclass(slots=True, kw_only=True)
class Side:
    """One of the two databases.

    Attributes:
        database: The connections that are measured.
        own: A connection that is not.
        waiting: Rollouts of today that wait.
        ended: Those that have ended.
        before: The place in the feed before the ends of today.
    """

    database: Database
    own: asyncpg.Connection
    waiting: Sequence[UUID]
    ended: Sequence[UUID]
    before: Cursor

    @property
    def names(self) -> ProjectNames:
        """The names of projects."""
        names = ProjectNames(self.database)
        names.learn(PROJECT, DEFAULT_PROJECT)
        return names


async def claim(side: Side) -> int:
    """Claims everything that waits."""
    table, session = PgLeaseTable(side.database, side.names), uuid7()
    for start in range(0, WAITING, BATCH):
        ids = side.waiting[start : start + BATCH]
        assert len(await table.claim([(each, session) for each in ids])) == len(ids)
    return len(side.waiting)


async def get(side: Side) -> int:
    """Reads ended rollouts one by one, with their attempts and usage."""
    table = RolloutTable(side.database, side.names)
    for each in side.ended[:CALLS]:
        assert len(await table.view([each], with_usage=True, with_attempts=True)) == 1
    return CALLS


async def feed(side: Side) -> int:
    """Reads a page of the feed of today's ends."""
    table = FeedTable(side.database)
    for _ in range(CALLS // 10):
        rows = await table.scan(Selection(project_id=PROJECT), after=side.before, limit=FEED_ROWS)
        assert len(rows) == FEED_ROWS
    return CALLS // 10


async def poll(side: Side) -> int:
    """Looks at the end of the feed, where nothing is new."""
    table = FeedTable(side.database)
    for _ in range(CALLS):
        assert not await table.scan(Selection(project_id=PROJECT), after=Cursor(xid=2**62), limit=FEED_ROWS)
    return CALLS


async def append(side: Side) -> int:
    """Appends chunks of spans of today's rollouts."""
    table = SpanTable(side.database, side.names)
    for start in range(0, CALLS * CHUNKS, CHUNKS):
        chunks = [
            Chunk(
                rollout_id=each,
                attempt=1,
                chunk_id=uuid7(),
                span_count=3,
                codec=2,
                start_ns=1,
                end_ns=2,
                payload=PAYLOAD,
            )
            for each in side.ended[start : start + CHUNKS]
        ]
        assert not await table.append([NewChunk(chunk=each, project=DEFAULT_PROJECT) for each in chunks])
    return CALLS


async def read(side: Side) -> int:
    """Reads the chunks of one rollout after the other."""
    table = SpanTable(side.database, side.names)
    for each in side.waiting[:CALLS]:
        (heads,) = await table.heads([SpanParent(project=DEFAULT_PROJECT, rollout_id=each)])
        assert len([chunk async for chunk in table.read(heads)]) == 1
    return CALLS


async def list_(side: Side) -> int:
    """Reads the newest page of a list."""
    lists = RolloutLists(side.database, side.names)
    for _ in range(CALLS):
        assert len((await lists.page(PROJECT, None, where=None, before=None, limit=PAGE)).views) == PAGE
    return CALLS


async def stats(side: Side) -> int:
    """Counts what waits and runs."""
    for _ in range(CALLS):
        assert await side.database.fetch("count_by_priority", PROJECT, None)
    return CALLS


OPERATIONS: Mapping[str, Callable[[Side], Awaitable[int]]] = {
    "claim": claim, "get": get, "feed, 512 ends": feed, "feed, nothing new": poll, "append": append, "read spans": read,
    "list": list_, "stats": stats,
}  # fmt: skip


async def write_rows(connection: asyncpg.Connection, ids: Sequence[UUID], *, ended: bool) -> None:
    """Writes rollouts with a chunk of spans each, in one commit; those that have ended with an attempt."""
    now = datetime.datetime.now(datetime.UTC)

    async def copy(table: str, columns: str, values: tuple[object, ...]) -> None:
        records = [(each, *values) for each in ids]
        await connection.copy_records_to_table(table, records=records, columns=columns.split())

    async with connection.transaction():
        await copy("rollout", "id project_id sort_priority mode request", (PROJECT, 0, 1, REQUEST))
        chunk = (1, uuid7(), 3, 2, 1, 2, PAYLOAD)
        await copy("span_chunk", "rollout_id attempt chunk_id span_count codec start_ns end_ns payload", chunk)
        if ended:
            attempt = (1, 2, 0, 4, uuid7(), now, REPORT)
            columns = "rollout_id number state failure_kind rollout_state session started_at report"
            await copy("attempt", columns, attempt)
            await copy("rollout_end", "rollout_id project_id group_size state failure_kind", (PROJECT, 1, 4, 0))
        else:
            columns = "id project_id sort_priority group_size max_attempts retry_mask backoff_ms timeout_ms run_at"
            await copy("item", columns, (PROJECT, 0, 1, 3, 24, 0, 1000, now))


Fill = Callable[[asyncpg.Connection], Awaitable[None]]


async def no_days(_: asyncpg.Connection) -> None:
    """Adds nothing to the rows of today."""


def some_days(days: int, rows_per_day: int) -> Fill:
    """Returns what writes ended rollouts of so many days."""

    async def fill(connection: asyncpg.Connection) -> None:
        for ago in range(days, 0, -1):
            moment_s = time.time() - ago * DAY_S
            day = datetime.datetime.fromtimestamp(moment_s, datetime.UTC).date()
            await connection.execute("select create_span_partition($1)", day)
            await write_rows(connection, uuid7s(rows_per_day, int(moment_s * 1000)), ended=True)

    return fill


@asynccontextmanager
async def prepared(dsn: str, name: str, fill: Fill, *, keep: bool = False) -> AsyncIterator[Side]:
    """Opens a database with what `fill` writes and rows of today; makes it if there is none, and drops it in the end unless told not to."""
    server = await asyncpg.connect(dsn)
    if not await server.fetchval("select count(*) from pg_database where datname = $1", name):
        await server.execute(f'create database "{name}"')
    dsn = urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
    await migrate(dsn)
    database, own = await connect(dsn, connections=2, start_limit_s=10), await asyncpg.connect(dsn)
    try:
        await Maintenance(table=UpkeepTable(database)).run_once()
        await fill(own)
        before = await own.fetchval("select coalesce(max(xid::text::bigint), 0) from rollout_end")
        waiting, ended = uuid7s(WAITING), uuid7s(ENDED)
        await own.execute("truncate item, live_count")
        await write_rows(own, waiting, ended=False)
        await own.execute(
            "insert into live_count (project_id, sort_priority, live) values ($1, 0, $2)", PROJECT, WAITING
        )
        await write_rows(own, ended, ended=True)
        await own.execute("vacuum analyze")
        last = Cursor(xid=before, rollout_id=UUID(int=2**128 - 1))
        yield Side(database=database, own=own, waiting=waiting, ended=ended, before=last)
    finally:
        await own.close()
        await database.close()
        if not keep:
            # What is not written yet need not be, when the server stops.
            await server.execute(f'drop database "{name}" with (force)')
        await server.close()


async def cpu_us(side: Side, operation: Callable[[Side], Awaitable[int]]) -> float:
    """Returns PostgreSQL's CPU of one operation, microseconds."""
    before = await _spent_us(side)
    count = await operation(side)
    return (await _spent_us(side) - before) / count


async def _spent_us(side: Side) -> float:
    rows = await side.own.fetch(
        "select pid from pg_stat_activity where datname = current_database() and application_name = 'fulmen-store'"
    )
    return sum(int(Path(f"/proc/{row['pid']}/schedstat").read_text().split()[0]) for row in rows) / 1000


async def compare(sides: Sequence[Side]) -> dict[str, list[float]]:
    """Runs each operation on each database in turn; returns the lowest costs, microseconds, in the order of the databases."""
    found = {}
    for name, operation in OPERATIONS.items():
        figures: list[list[float]] = [[] for _ in sides]
        for _ in range(ROUNDS):
            for side, costs in zip(sides, figures, strict=True):
                costs.append(await cpu_us(side, operation))
                await side.own.execute("update item set session = null, leased_at = null where session is not null")
                await side.own.execute("vacuum item")
        # The first round makes the plans; other work on the machine only adds.
        found[name] = [min(costs[1:]) for costs in figures]
    return found


async def run(bench: Bench) -> None:
    """Fills both databases, runs each operation on them in turn, and claims the ratios of their lowest costs."""
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        sides = [
            await stack.enter_async_context(prepared(bench.dsn, name, fill))
            for name, fill in (("bench_today", no_days), ("bench_days", some_days(bench.days, bench.rows_per_day)))
        ]
        raw: dict[str, Any] = {"days": bench.days, "rows_per_day": bench.rows_per_day}
        raw["fill_s"] = round(time.perf_counter() - started, 1)
        for name, (today, kept) in (await compare(sides)).items():
            raw[name] = {"today_us": round(today, 1), "kept_us": round(kept, 1)}
            title = f"{bench.days:,} days kept, {name}: PostgreSQL CPU beside today alone"
            bench.claim(title, kept / today, "x", GOAL, "lower")
    bench.raw["days"] = raw
