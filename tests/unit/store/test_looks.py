"""Shared looks: one for all watchers of a key, who are woken by news alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fulmen.errors import DatabaseUnavailable
from fulmen_store.looks import Looked, Looks, Shared

WATCHERS = 200
LIMIT_S = 10.0


class Sights:
    """Something to look at."""

    def __init__(self) -> None:
        self.value = 0
        self.fails = False
        self.looks = 0
        self.looked = asyncio.Condition()

    async def look(self, key: str, last: int | None) -> Looked[int]:
        """Looks."""
        async with self.looked:
            self.looks += 1
            self.looked.notify_all()
        if self.fails:
            raise DatabaseUnavailable("away")
        return Looked(seen=self.value, is_news=self.value != last)

    async def more_looks(self, count: int) -> None:
        """Waits for so many looks."""
        until = self.looks + count
        async with asyncio.timeout(LIMIT_S), self.looked:
            await self.looked.wait_for(lambda: self.looks >= until)


class Watchers:
    """Watchers of one key, and what they were woken for."""

    def __init__(self, looks: Looks[str, int]) -> None:
        self._looks = looks
        self.seen: list[list[int | None]] = []
        self.woken = 0

    async def watch(self) -> None:
        """Watches until cancelled."""
        mine: list[int | None] = []
        self.seen.append(mine)
        with self._looks.watching("key") as shared:
            number = 0
            while True:
                await shared.wait(number, LIMIT_S)
                self.woken += 1
                number = shared.number
                mine.append(shared.seen)


@asynccontextmanager
async def watchers(looks: Looks[str, int]) -> AsyncIterator[Watchers]:
    """Runs watchers."""
    found = Watchers(looks)
    tasks = [asyncio.create_task(found.watch()) for _ in range(WATCHERS)]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def looks_at(sights: Sights, stopping: asyncio.Event | None = None) -> Looks[str, int]:
    return Looks(sights.look, pause_s=0.001, stopping=stopping or asyncio.Event())


async def test_idle_watchers_share_their_looks_and_sleep() -> None:
    sights = Sights()
    async with watchers(looks_at(sights)) as found:
        await sights.more_looks(3)
        woken, looks = found.woken, sights.looks
        await sights.more_looks(20)
        # Two hundred watchers that each looked would have looked thousands of times.
        assert sights.looks - looks <= 21
        assert (woken, found.woken) == (WATCHERS, WATCHERS)


async def test_news_wakes_all_watchers() -> None:
    sights = Sights()
    async with watchers(looks_at(sights)) as found:
        await sights.more_looks(2)
        sights.value = 7
        await sights.more_looks(3)
        assert found.seen == [[0, 7]] * WATCHERS


async def test_looks_end_with_the_last_watcher() -> None:
    sights = Sights()
    looks = looks_at(sights)
    async with watchers(looks):
        await sights.more_looks(1)
        assert len(looks) == 1
    assert len(looks) == 0
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("look-")] == []


async def test_a_failed_look_is_told_to_those_who_wait_and_to_those_who_come_until_one_succeeds() -> None:
    sights = Sights()
    looks = looks_at(sights)
    with looks.watching("key") as first, looks.watching("key") as second:
        await first.wait(0, LIMIT_S)
        sights.fails = True
        for each in (first, second):
            with pytest.raises(DatabaseUnavailable):
                await each.wait(each.number, LIMIT_S)
        sights.fails, sights.value = False, 3
        await sights.more_looks(2)
        await second.wait(1, LIMIT_S)
        assert second.seen == 3


async def test_a_shutdown_wakes_the_watchers() -> None:
    sights, stopping = Sights(), asyncio.Event()
    with looks_at(sights, stopping).watching("key") as shared:
        await shared.wait(0, LIMIT_S)
        waiting = asyncio.create_task(waits(shared))
        await asyncio.sleep(0)
        stopping.set()
        async with asyncio.timeout(LIMIT_S):
            await waiting


async def waits(shared: Shared[int]) -> None:
    await shared.wait(shared.number, 10 * LIMIT_S)
