"""Turns of projects: whoever floods waits behind its own calls, and another's call comes at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fulmen.errors import QuotaExceeded
from fulmen_service_kit.security import fair_turns
from fulmen_service_kit.security.fair_turns import FairQueue, FairSlots, FairTurns, Timed

LIMIT_S = 30.0
FLOOD = 200


def ready(work: Awaitable[None]) -> asyncio.Future[None]:
    return asyncio.ensure_future(work)


@asynccontextmanager
async def slot_of(slots: FairSlots, project: str) -> AsyncIterator[None]:
    await slots.take(project)
    try:
        yield
    finally:
        slots.release(project)


async def test_another_projects_call_begins_while_a_flood_waits() -> None:
    turns, begun = FairTurns(), list[str]()
    await turns.wait("bob")

    async def call(project: str) -> None:
        await turns.wait(project)
        begun.append(project)

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(call("ann") for _ in range(FLOOD)), call("bob"))
    assert len(begun) == FLOOD + 1
    assert begun.index("bob") <= 1


async def test_calls_of_a_project_begin_in_the_order_in_which_they_came() -> None:
    turns, begun = FairTurns(), list[int]()
    await turns.wait("bob")

    async def call(number: int) -> None:
        await turns.wait("ann")
        begun.append(number)

    calls = [ready(call(number)) for number in range(10)]
    await asyncio.sleep(0)
    calls[3].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert begun == [0, 1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("others", [False, True])
async def test_a_flood_leaves_the_loop_time_for_others_and_a_project_alone_has_all(others: bool) -> None:
    turns, pauses = FairTurns(), list[float]()
    loop = asyncio.get_running_loop()
    original = loop.call_later

    def call_later(delay_s: float, *arguments: object) -> asyncio.TimerHandle:
        if getattr(arguments[0], "__func__", None) is FairTurns._next:
            pauses.append(delay_s)
        return original(delay_s, *arguments)  # type: ignore[arg-type]

    loop.call_later = call_later  # type: ignore[method-assign]  # to see the pauses without measuring time

    async def call(project: str) -> None:
        await turns.wait(project)
        turns.spend(project, 0.003)

    try:
        async with asyncio.timeout(LIMIT_S):
            flood = [ready(call("ann")) for _ in range(10)]
            if others:
                await call("bob")
            await asyncio.gather(*flood)
    finally:
        loop.call_later = original  # type: ignore[method-assign]
    assert bool(pauses) is others
    if others:
        assert max(pauses) > 0.003


async def test_nothing_is_kept_of_a_project_without_calls() -> None:
    turns = FairTurns()
    await turns.wait("bob")
    await asyncio.gather(*(turns.wait("ann") for _ in range(5)))
    async with asyncio.timeout(LIMIT_S):
        while turns._lines:  # noqa: ASYNC110  # the loop's own turns
            await asyncio.sleep(0)
    assert turns._backlogged == 0


async def test_a_project_holds_its_share_of_slots_while_others_use_them_and_all_when_alone() -> None:
    now_s = 0.0
    slots = FairSlots(4, share=2, clock=lambda: now_s)
    async with AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(slot_of(slots, "ann"))
    async with AsyncExitStack() as held:
        await held.enter_async_context(slot_of(slots, "bob"))
        for _ in range(2):
            await held.enter_async_context(slot_of(slots, "ann"))
        third = ready(held.enter_async_context(slot_of(slots, "ann")))
        await asyncio.sleep(0)
        assert not third.done()
        async with slot_of(slots, "bob"):
            pass
        assert not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
    now_s = 2.0
    async with AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(slot_of(slots, "ann"))


async def test_a_free_slot_goes_to_the_projects_in_turn() -> None:
    slots, order = FairSlots(1, share=1), list[str]()

    async def use(project: str) -> None:
        async with slot_of(slots, project):
            order.append(project)
            await asyncio.sleep(0)

    await asyncio.gather(*(use("ann") for _ in range(5)), use("bob"), use("eve"))
    assert order[:4] == ["ann", "ann", "bob", "eve"]
    assert order[4:] == ["ann"] * 3


async def test_a_slot_given_to_a_call_that_is_cancelled_in_the_same_turn_is_free_again() -> None:
    slots = FairSlots(1, share=1)
    async with AsyncExitStack() as held:
        await held.enter_async_context(slot_of(slots, "ann"))
        waiting = ready(AsyncExitStack().enter_async_context(slot_of(slots, "bob")))
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(LIMIT_S), slot_of(slots, "eve"):
        pass


async def test_a_call_that_waits_too_long_for_a_slot_is_refused_with_the_time_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_turns, "SLOT_LIMIT_S", 0.01)
    slots = FairSlots(1, share=1)
    async with slot_of(slots, "ann"):
        with pytest.raises(QuotaExceeded) as refused:
            async with slot_of(slots, "ann"):
                pass
    assert refused.value.retry_after_s


def test_a_queue_takes_from_projects_in_turn() -> None:
    queue = FairQueue[int]()
    for number in range(3):
        queue.put("ann", number)
    queue.put("bob", 10)
    assert queue.first() == 0
    assert [queue.take() for _ in range(4)] == [0, 10, 1, 2]
    assert not queue


async def test_only_time_on_the_loop_is_charged_and_errors_and_cancellations_pass() -> None:
    spent = list[float]()

    async def work() -> int:
        begun_s = time.perf_counter()
        while time.perf_counter() < begun_s + 0.002:
            pass
        await asyncio.sleep(0.2)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return 7
        return 0

    task = asyncio.ensure_future(Timed(work(), spent.append))
    while len(spent) < 2:  # noqa: ASYNC110  # steps of the task
        await asyncio.sleep(0.01)
    task.cancel()
    assert await task == 7
    assert 0.002 <= sum(spent) < 0.2

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await Timed(fail(), spent.append)
