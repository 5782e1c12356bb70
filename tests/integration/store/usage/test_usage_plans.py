"""Statements about usage look at what they are asked for, however much usage there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fulmen_store.database.database import HOT_SETTINGS
from fulmen_store.database.queries import SQL

ROWS = 20_000
RUNS = 100
MODELS = 4
FIRST, LAST = UUID(int=0), UUID(int=(1 << 128) - 1)


@pytest.fixture
async def connection(database_url: str) -> Any:
    """Yields a connection with the settings of the store."""
    opened = await asyncpg.connect(database_url, server_settings=HOT_SETTINGS)
    yield opened
    await opened.close()


async def test_statements_prepared_on_empty_tables_stay_probes_when_these_have_grown(connection: Any) -> None:
    asked = {
        "attempt_tokens": (f"array['{UUID(int=7)}'::uuid], array[1], array['projects/default']", MODELS),
        "usage_by_attempt": (f"1, null, '{UUID(int=7)}', '{UUID(int=7)}', 5, null, 10", MODELS),
        "usage_by_minute": ("1, now() - interval '2 minutes', null, 1, null, 10", 3 * MODELS),
    }
    of_run = (f"1, 5, '{FIRST}', '{LAST}', 4, null, 10", ROWS // RUNS)
    for name, (arguments, _) in asked.items():
        await connection.execute(f"prepare {name} as {SQL[name]}")
        await connection.execute(f"execute {name} ({arguments})")
    await connection.execute(
        "insert into usage_attempt select ('00000000-0000-0000-0000-' || lpad(to_hex(n / $2), 12, '0'))::uuid, 1, "
        "'m' || n % $2, 'b', 1, n / $2 % $3, 1, 0, 1, 0, 1, 0 from generate_series(0, $1 - 1) n",
        ROWS,
        MODELS,
        RUNS,
    )
    await connection.execute(
        "insert into usage_minute select 1, date_trunc('minute', now()) - n / $2 * interval '1 minute', 'm' || n % $2, "
        "'b', 1, 0, 1, 0, 1, 0 from generate_series(0, $1 - 1) n",
        ROWS,
        MODELS,
    )
    for grown in ("select 1", "analyze"):
        await connection.execute(grown)
        for name, (arguments, most) in (*asked.items(), ("usage_by_attempt", of_run)):
            assert 0 < await _looked_at(connection, name, arguments) <= most, (name, grown)


async def test_a_statement_that_looks_through_everything_is_noticed(connection: Any) -> None:
    await connection.execute(
        "insert into usage_attempt select gen_random_uuid(), 1, 'm', 'b', 1, 1, 1, 0, 1, 0, 1, 0 "
        "from generate_series(1, 1000)"
    )
    await connection.execute("prepare through as select count(*) from usage_attempt u where u.request_count = $1")
    assert await _looked_at(connection, "through", "7") == 1000


async def _looked_at(connection: Any, name: str, arguments: str) -> float:
    told = await connection.fetchval(
        f"explain (analyze, costs off, timing off, format json) execute {name} ({arguments})"
    )
    scans = [node for node in _nodes(json.loads(told)[0]["Plan"]) if "usage_" in node.get("Relation Name", "")]
    return sum((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in scans)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)
