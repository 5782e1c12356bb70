"""The crash matrix says when it could not see, instead of "never"."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from benchmarks.reliability.stand import Stand
from benchmarks.reliability.watch import Watch


class Broken:
    """A connection that ended between two steps of a statement, as the driver leaves it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_closed(self) -> bool:
        return False

    def terminate(self) -> None:
        return

    async def fetch(self, *_: object) -> list[Any]:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'decode'"),
        asyncpg.InternalClientError("confused"),
        asyncpg.InterfaceError("closed"),
        asyncpg.CannotConnectNowError("starting"),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_database_that_dies_in_the_middle_of_a_statement_is_one_that_does_not_answer(
    error: Exception, tmp_path: Path
) -> None:
    stand = Stand(tmp_path)
    stand._database = Broken(error)
    with pytest.raises(OSError, match=str(error) or "^$"):
        await stand.query("select 1")
    assert stand._database is None


async def test_a_look_that_fails_is_in_the_notes_of_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asyncio.Event()

    async def fails(self: Watch) -> None:
        seen.set()
        raise KeyError("rows")

    monkeypatch.setattr(Watch, "_look_at_rollouts", fails)
    watch = Watch(Stand(tmp_path), None, "projects/default/trainingRuns/x", victims=())  # type: ignore[arg-type]
    async with watch:
        await seen.wait()
    assert any("KeyError" in note for note in watch.blind)
