"""Years that are kept: a database with up to 1,000 days, 10^7 rollouts and 10^8 spans, beside a database of today alone.

Rows are made in PostgreSQL, a day in a commit, and what is there is not made again: a run that was interrupted, or that reached
its limit of time or disk, goes on with the same folder. Then the hot statements run on both databases in turn, as in `days`.
Run `python -m benchmarks.store.years [--scale S] [--days N] [--folder F] [--limit-s T] [--limit-gb G] [--only-fill]`; scale 1 is
10^7 rollouts. Adds the run to benchmarks/results/years.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from benchmarks import outcome
from benchmarks.store.days import GOAL, PROJECT, compare, no_days, prepared
from benchmarks.store.stand import running_postgres

ROLLOUTS = 10_000_000
SPANS_PER_ROLLOUT = 10
SPAN_BYTES = 176
"""About as much as a span takes compressed; a chunk of ten is then stored as it is."""
DAYS_PER_RUN = 10
FILL = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
_FILLED = """
create table if not exists bench_day (day date primary key, rollouts int not null, made_at timestamptz not null default now())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a database is to have, and what it may take.

    Attributes:
        rollouts: All rollouts; each day has the same number.
        limit_s: Seconds after which no further day is begun.
        limit_bytes: Size of the database above which none is.
    """

    days: int
    rollouts: int
    limit_s: float = 900.0
    limit_bytes: int = 20 * 10**9

    @property
    def per_day(self) -> int:
        """Rollouts of a day; at least one."""
        return max(1, self.rollouts // self.days)


async def fill(connection: asyncpg.Connection, plan: Plan) -> bool:
    """Writes the days that are missing, the latest first; returns whether all are there now."""
    await connection.execute(_FILLED)
    await connection.execute("set synchronous_commit = off")
    there = {row["day"]: row["rollouts"] for row in await connection.fetch("select day, rollouts from bench_day")}
    if others := set(there.values()) - {plan.per_day}:
        raise ValueError(
            f"days of this database have {others} rollouts, not {plan.per_day}: take the same scale, or another folder"
        )
    # Days count from the one before the first that was made, on whichever day the fill goes on.
    first = max(there) if there else datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    until = time.monotonic() + plan.limit_s
    for ago in range(plan.days):
        day = first - datetime.timedelta(days=ago)
        if day in there:
            continue
        if time.monotonic() > until or await _size_bytes(connection) > plan.limit_bytes:
            return False
        await _fill_day(connection, day, plan.per_day)
    return True


async def _fill_day(connection: asyncpg.Connection, day: datetime.date, rollouts: int) -> None:
    await connection.execute("select create_span_partition($1)", day)
    name = f"projects/default/trainingRuns/years-{day.toordinal() // DAYS_PER_RUN}"
    async with connection.transaction():
        run = await connection.fetchval(
            """
            insert into training_run (project_id, name, used_at) values ($1, $2, $3)
            on conflict (project_id, name) do update set used_at = excluded.used_at returning id
            """,
            *(PROJECT, name, datetime.datetime.combine(day, datetime.time(), datetime.UTC)),
        )
        await connection.execute(FILL, day, rollouts, run, SPANS_PER_ROLLOUT, SPAN_BYTES)
        await connection.execute("insert into bench_day (day, rollouts) values ($1, $2)", day, rollouts)


async def contents(connection: asyncpg.Connection) -> dict[str, int]:
    """Returns what a filled database has: days, rollouts, spans and bytes."""
    row = await connection.fetchrow(
        "select count(*) as days, coalesce(sum(rollouts), 0)::bigint as rollouts from bench_day"
    )
    return {
        "days": row["days"],
        "rollouts": row["rollouts"],
        "spans": row["rollouts"] * SPANS_PER_ROLLOUT,
        "bytes": await _size_bytes(connection),
    }


async def _size_bytes(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("select pg_database_size(current_database())"))


async def measure(dsn: str, plan: Plan, *, only_fill: bool) -> dict[str, Any]:
    """Fills a database, and measures it beside one of today alone; returns the raw figures."""
    raw: dict[str, Any] = {}

    async def fill_years(connection: asyncpg.Connection) -> None:
        started = time.monotonic()
        complete = await fill(connection, plan)
        raw.update(await contents(connection), complete=complete, fill_s=round(time.monotonic() - started, 1))
        _say(json.dumps(raw))

    async with (
        prepared(dsn, "bench_years", fill_years, keep=True) as kept,
        prepared(dsn, "bench_today", no_days) as today,
    ):
        if not only_fill:
            raw["postgres_us"] = {
                name: {"today": round(alone, 1), "kept": round(beside, 1), "ratio": round(beside / alone, 3)}
                for name, (alone, beside) in (await compare([today, kept])).items()
            }
    return raw


@asynccontextmanager
async def _folder(given: str) -> AsyncIterator[Path]:
    with contextlib.ExitStack() as stack:
        path = Path(given or stack.enter_context(tempfile.TemporaryDirectory(prefix="fulmen-bench-")))
        await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
        path.chmod(0o755)  # PostgreSQL's own user passes through
        yield path


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = Plan(
        days=arguments.days,
        rollouts=round(ROLLOUTS * arguments.scale),
        limit_s=arguments.limit_s,
        limit_bytes=round(arguments.limit_gb * 10**9),
    )
    async with _folder(arguments.folder) as folder, running_postgres(folder) as dsn:
        return await measure(dsn, plan, only_fill=arguments.only_fill)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Fills, measures, and adds the run to the results."""
    parser = argparse.ArgumentParser(description="Measures the store over years.")
    parser.add_argument("--scale", type=float, default=0.1, help="share of 10^7 rollouts and 10^8 spans")
    parser.add_argument("--days", type=int, default=1000, help="days among which they are spread")
    parser.add_argument(
        "--folder", default="", help="where the database is kept, to go on later; a temporary one by default"
    )
    parser.add_argument("--limit-s", type=float, default=900, help="seconds after which no further day is made")
    parser.add_argument("--limit-gb", type=float, default=40, help="size after which no further day is made")
    parser.add_argument("--only-fill", action="store_true", help="measure nothing, write no result")
    arguments = parser.parse_args()
    raw = uvloop.run(_run(arguments))
    if arguments.only_fill:
        return
    claims = [
        outcome.claim(
            f"{raw['days']:,} days and {raw['rollouts']:,} rollouts kept, {name}: PostgreSQL CPU beside today alone",
            *(figures["ratio"], "x"),
            goal=GOAL,
            better="lower",
        )
        for name, figures in raw["postgres_us"].items()
    ]
    outcome.write("years", method=__doc__ or "", raw=raw, claims=claims)


if __name__ == "__main__":
    main()
