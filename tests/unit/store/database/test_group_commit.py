"""Natural group commit: what waits goes together, everybody is answered after the own commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable
from fulmen_service_kit.security.auth import set_caller
from fulmen_service_kit.security.tokens import Caller, Role
from fulmen_store.database.group_commit import GroupCommitter


@asynccontextmanager
async def running(committer: GroupCommitter[int, int]) -> AsyncIterator[GroupCommitter[int, int]]:
    role = asyncio.create_task(committer.run())
    try:
        yield committer
    finally:
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)


async def test_what_waits_during_a_commit_goes_into_the_next_one() -> None:
    batches: list[int] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def execute(rows: Sequence[int]) -> list[int]:
        batches.append(len(rows))
        begun.set()
        await gate.wait()
        return [row * 2 for row in rows]

    async with running(GroupCommitter("work", execute)) as committer:
        first = asyncio.create_task(committer.submit([1]))
        await begun.wait()
        rest = [asyncio.create_task(committer.submit([number, number])) for number in range(10)]
        await asyncio.sleep(0)
        gate.set()
        assert await first == [2]
        assert [await task for task in rest] == [[number * 2] * 2 for number in range(10)]
    assert batches == [1, 20]


async def test_projects_fill_a_batch_in_turns() -> None:
    batches: list[list[int]] = []

    async def execute(rows: Sequence[int]) -> Sequence[int]:
        batches.append(list(rows))
        return rows

    committer = GroupCommitter("work", execute, max_rows=2)

    async def submit(project: str, row: int) -> None:
        set_caller(Caller(role=Role.CLIENT, project=project))
        await committer.submit([row])

    calls = [asyncio.create_task(submit("projects/ann", row)) for row in range(4)]
    calls.append(asyncio.create_task(submit("projects/bob", 10)))
    await asyncio.sleep(0)
    async with running(committer):
        await asyncio.gather(*calls)
    assert batches == [[0, 10], [1, 2], [3]]


async def test_batches_respect_rows_and_bytes_but_take_a_large_caller_whole() -> None:
    batches: list[int] = []

    async def execute(rows: Sequence[int]) -> Sequence[int]:
        batches.append(len(rows))
        return rows

    committer: GroupCommitter[int, int] = GroupCommitter("work", execute, max_rows=10, max_bytes=100)
    calls = [([0] * 25, 0), ([0] * 6, 0), ([0] * 6, 0), ([0], 90), ([0], 90)]
    async with running(committer):
        await asyncio.gather(*(committer.submit(rows, size_bytes=size) for rows, size in calls))
    assert batches == [25, 6, 7, 1]


async def test_a_caller_does_not_fail_for_its_neighbour() -> None:
    async def execute(rows: Sequence[int]) -> Sequence[int]:
        if 13 in rows:
            raise ArgumentInvalid("no thirteen")
        return rows

    async with running(GroupCommitter("work", execute)) as committer:
        results = await asyncio.gather(*(committer.submit([n]) for n in (1, 13, 2)), return_exceptions=True)
    assert results[0] == [1]
    assert isinstance(results[1], ArgumentInvalid)
    assert results[2] == [2]


async def test_a_lost_database_fails_everybody_and_the_next_batch_is_tried_again() -> None:
    fails = iter([True, False])

    async def execute(rows: Sequence[int]) -> Sequence[int]:
        if next(fails):
            raise DatabaseUnavailable("gone")
        return rows

    async with running(GroupCommitter("work", execute)) as committer:
        results = await asyncio.gather(*(committer.submit([n]) for n in (1, 2)), return_exceptions=True)
        assert [type(result) for result in results] == [DatabaseUnavailable] * 2
        assert await committer.submit([3]) == [3]


async def test_callers_that_wait_when_the_role_ends_are_told() -> None:
    async def execute(rows: Sequence[int]) -> Sequence[int]:
        await asyncio.Event().wait()
        return rows

    committer: GroupCommitter[int, int] = GroupCommitter("work", execute)
    role = asyncio.create_task(committer.run())
    taken = asyncio.create_task(committer.submit([1]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting = asyncio.create_task(committer.submit([2]))
    await asyncio.sleep(0)
    role.cancel()
    with pytest.raises(DatabaseUnavailable):
        await waiting
    with pytest.raises(DatabaseUnavailable):
        await taken
