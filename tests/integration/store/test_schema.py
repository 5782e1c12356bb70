"""The schema: every statement fits it, its checks say what the domain says, hot plans stay index probes."""

from __future__ import annotations

import itertools
import re
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fulmen.errors import DatabaseUnavailable
from fulmen.ids import uuid7
from fulmen_store.domain.transitions import ATTEMPT_ENDS, AttemptState, FailureKind, RolloutState
from fulmen_store.persistence.database import HOT_SETTINGS, connect
from fulmen_store.persistence.queries import SQL

ADD_ITEMS = """
insert into item (id, project_id, rank, group_size, max_attempts, retry_mask, backoff_ms, run_at)
select gen_random_uuid(), 1, 0, 1, 3, 24, 0, now() from generate_series(1, $1::int)
"""

NO_SESSION = "01900000-0000-7000-8000-000000000000"


@pytest.fixture
async def connection(database_url: str) -> Any:
    """Yields a connection with the settings of the store."""
    opened = await asyncpg.connect(database_url, server_settings=HOT_SETTINGS)
    yield opened
    await opened.close()


async def test_every_statement_can_be_prepared(connection: Any) -> None:
    statements = dict(SQL.items())
    assert len(statements) > 30
    for statement in statements.values():
        await connection.prepare(statement)


async def test_the_database_knows_the_same_legal_ends_as_the_domain(connection: Any) -> None:
    states = (AttemptState.SUCCEEDED, AttemptState.FAILED)
    for state, kind, rollout_state in itertools.product(states, FailureKind, RolloutState):
        arguments = (uuid7(), state, kind, rollout_state, uuid7())
        insert = connection.execute(
            "insert into attempt (rollout_id, number, state, failure_kind, rollout_state, session, started_at, report)"
            " values ($1, 1, $2, $3, $4, $5, now(), '')",
            *arguments,
        )
        if (state, kind, rollout_state) in ATTEMPT_ENDS:
            await insert
        else:
            with pytest.raises(asyncpg.CheckViolationError):
                await insert


async def test_a_rollout_ends_only_once(connection: Any) -> None:
    insert = (
        "insert into rollout_end (rollout_id, project_id, group_size, state, failure_kind) values ($1, 1, 1, $2, $3)"
    )
    rollout_id = uuid7()
    await connection.execute(insert, rollout_id, RolloutState.FAILED, FailureKind.TIMEOUT)
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute(insert, rollout_id, RolloutState.SUCCEEDED, FailureKind.NONE)


async def test_plans_made_on_an_empty_table_stay_index_probes_when_it_has_grown(connection: Any) -> None:
    """A textbook join prepared on an empty table costs 10 ms per row later; these must not depend on statistics."""
    names = (
        "claim_rollouts", "held_leases", "cancel_rollouts", "end_attempts", "claim_hedges", "end_hedged_attempts",
    )  # fmt: skip
    for name in names:
        await connection.execute(f"prepare {name} as {SQL[name]}")
        await _explain(connection, name, [uuid7() for _ in range(100)])
    await connection.execute(ADD_ITEMS, 30000)
    ids = [row["id"] for row in await connection.fetch("select id from item limit 100")]
    for name in names:
        plan = await _explain(connection, name, ids)
        assert "Seq Scan on item" not in plan, plan
        assert "item_pkey" in plan, plan
        dropped = [int(count) for count in re.findall(r"Rows Removed by (?:Join )?Filter: (\d+)", plan)]
        assert all(count <= len(ids) for count in dropped), plan


async def test_leases_are_found_without_looking_through_the_backlog(connection: Any) -> None:
    await connection.execute(ADD_ITEMS, 20000)
    await connection.execute(
        "update item set session = gen_random_uuid(), leased_at = now(), epoch = 1"
        " where id in (select id from item order by id limit 20)"
    )
    for name, arguments in (("session_leases", "'{}'"), ("orphaned_leases", "1000")):
        await connection.execute(f"prepare {name} as {SQL[name]}")
        rows = await connection.fetch(f"explain (analyze, format text) execute {name}({arguments})")
        plan = "\n".join(row[0] for row in rows)
        assert "item_leased" in plan, plan


async def test_a_database_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(DatabaseUnavailable):
        await connect("postgresql://nobody@127.0.0.1:1/none", connections=2, start_limit_s=0)


async def _explain(connection: Any, name: str, ids: list[UUID]) -> str:
    count = len(ids)
    rest: dict[str, list[str]] = {
        "cancel_rollouts": ["30"],
        "claim_rollouts": [_repeated(NO_SESSION, count)],
        "end_attempts": [
            _repeated(NO_SESSION, count),
            *(_repeated(value, count) for value in ("1", "f", "2", "0", "4", "0.0", "1", "")),
        ],
        "claim_hedges": [_repeated(NO_SESSION, count), _repeated("0.0", count)],
        "end_hedged_attempts": [
            _repeated(NO_SESSION, count),
            *(_repeated(value, count) for value in ("1", "f", "2", "0", "4", "")),
        ],
    }
    arguments = ", ".join([f"'{{{','.join(map(str, ids))}}}'", *rest.get(name, [])])
    transaction = connection.transaction()
    await transaction.start()
    try:
        rows = await connection.fetch(f"explain (analyze, costs off, timing off) execute {name} ({arguments})")
        return "\n".join(row[0] for row in rows)
    finally:
        await transaction.rollback()


def _repeated(value: str, count: int) -> str:
    return "'{" + ",".join([f'"{value}"'] * count) + "}'"
