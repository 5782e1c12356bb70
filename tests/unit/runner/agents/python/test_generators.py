"""Agents that are generators of steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import ContextVar

import pytest

from fulmen.agent import Context, current_step, entered
from fulmen.emit import RewardInvalid, emit_reward
from fulmen_runner.agents.python.generators import Stopped, Walked, walk, walk_async

Steps = dict[int, float]
Factory = Callable[[], "Generator[object, None, object] | AsyncGenerator[object, None]"]


def context() -> Context:
    return Context(rollout="r", attempt="r/attempts/1", attempt_number=1, mode="train", deadline=0.0)


async def taken(factory: Factory, *, rewarded: bool = True) -> tuple[Walked, Steps]:
    """Walks a generator of either kind; returns its end and the rewards of its steps."""
    with entered(context()) as attempt:
        generator = factory()
        if isinstance(generator, AsyncGenerator):
            end = await walk_async(generator, rewarded=rewarded)
        else:
            end = walk(generator, rewarded=rewarded, stop=threading.Event())
    assert current_step() is None
    return end, {step: value for (_, step, _), value in attempt.rewards.items()}


def returns() -> Generator[object, None, object]:
    yield 0.25
    yield "thought"
    yield True
    return "answer"


def returns_nothing() -> Generator[object, None, None]:
    yield 1
    yield "last"


def is_empty() -> Generator[object, None, str]:
    yield from ()
    return "at once"


async def yields() -> AsyncGenerator[object, None]:
    yield 0.5
    await asyncio.sleep(0)
    yield {"answer": 1}


@pytest.mark.parametrize(
    ("factory", "end", "steps"),
    [
        (returns, Walked(value="answer", returned=True), {0: 0.25, 2: 1.0}),
        (returns_nothing, Walked(value="last", returned=False), {0: 1.0}),
        (is_empty, Walked(value="at once", returned=True), {}),
        (yields, Walked(value={"answer": 1}, returned=False), {0: 0.5}),
    ],
)
async def test_each_yield_ends_a_step(factory: Factory, end: Walked, steps: Steps) -> None:
    assert await taken(factory) == (end, steps)
    assert await taken(factory, rewarded=False) == (end, {})


async def test_code_knows_the_step_that_it_belongs_to() -> None:
    seen = []

    async def looks() -> AsyncGenerator[object, None]:
        for _ in range(3):
            await asyncio.create_task(note())
            yield None

    async def note() -> None:
        seen.append(current_step())
        emit_reward(1.0)

    _, rewards = await taken(looks)
    assert seen == [0, 1, 2]
    assert rewards == {None: 1.0}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_a_step_whose_number_is_not_finite_is_refused(number: float) -> None:
    def wrong() -> Generator[object, None, None]:
        yield number

    with pytest.raises(RewardInvalid, match="finite"):
        await taken(wrong)


async def test_a_cancelled_generator_is_closed_where_it_ran() -> None:
    place: ContextVar[str] = ContextVar("place")
    started, seen = asyncio.Event(), []

    async def waits() -> AsyncGenerator[object, None]:
        place.set("inside")
        yield 1
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            seen.append((asyncio.current_task(), place.get()))

    task = asyncio.create_task(taken(waits))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [(task, "inside")]


async def test_a_generator_that_catches_its_cancellation_ends_at_its_next_step() -> None:
    started, closed = asyncio.Event(), []

    async def stubborn() -> AsyncGenerator[object, None]:
        try:
            while True:
                try:
                    started.set()
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    yield "not yet"
        finally:
            closed.append(True)

    task = asyncio.create_task(taken(stubborn))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]


def test_a_generator_in_a_thread_ends_after_the_step_in_which_it_is_stopped() -> None:
    stop, closed = threading.Event(), []

    def endless() -> Generator[object, None, None]:
        try:
            while True:
                stop.set()
                yield None
        finally:
            closed.append(threading.current_thread())

    with pytest.raises(Stopped), entered(context()):
        walk(endless(), rewarded=True, stop=stop)
    assert closed == [threading.current_thread()]
