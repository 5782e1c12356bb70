"""The schema: every statement fits it and is used, and its checks say what the domain says."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import fulmen_store
from fulmen.errors import DatabaseUnavailable
from fulmen.ids import uuid7
from fulmen_store.database.database import connect
from fulmen_store.database.queries import SQL
from fulmen_store.rollouts.transitions import ATTEMPT_ENDS, AttemptState, FailureKind, RolloutState

STORE = Path(fulmen_store.__file__).parent
FETCHES = frozenset({"fetch", "fetch_row", "fetch_filtered", "fetch_of_days"})


async def test_every_statement_can_be_prepared(connection: Any) -> None:
    statements = dict(SQL.items())
    assert len(statements) > 100
    for name, statement in statements.items():
        try:
            await connection.prepare(statement)
        except asyncpg.PostgresError as error:
            pytest.fail(f"{name}: {error}")


def test_every_statement_is_used_and_every_one_that_is_used_exists() -> None:
    used, mentioned = set(), set()
    for path in STORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                mentioned.add(node.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FETCHES:
                used |= {one.value for one in node.args[:1] if isinstance(one, ast.Constant) and " " not in one.value}
    known = {name for name, _ in SQL.items()}
    assert len(used) > 60
    assert not used - known
    assert not known - mentioned


def test_no_statement_waits_for_a_name_that_is_made_of_a_text() -> None:
    """Statements are constants: what callers bring in are values, or conditions of the fragments."""
    for path in STORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FETCHES:
                assert not any(isinstance(one, ast.JoinedStr | ast.BinOp) for one in node.args[:1]), path


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


async def test_a_database_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(DatabaseUnavailable):
        await connect("postgresql://nobody@127.0.0.1:1/none", connections=2, start_limit_s=0)
