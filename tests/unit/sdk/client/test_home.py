"""One loop in a thread of its own serves callers of every loop and of none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from fulmen.rpc.home import await_at_home, block_on, iterate


async def thread_name() -> str:
    return threading.current_thread().name


async def numbers(closed: threading.Event) -> AsyncIterator[int]:
    try:
        for number in range(3):
            await asyncio.sleep(0)
            yield number
    finally:
        closed.set()


def test_scripts_and_loops_of_all_threads_meet_in_one_thread() -> None:
    async def elsewhere() -> str:
        return await await_at_home(thread_name)

    assert {block_on(thread_name()), asyncio.run(elsewhere()), asyncio.run(elsewhere())} == {"fulmen"}


def test_what_is_at_home_already_is_awaited_there() -> None:
    async def nested() -> str:
        return await await_at_home(thread_name)

    assert block_on(nested()) == "fulmen"


def test_an_iteration_is_closed_also_when_it_is_broken_off() -> None:
    whole, broken = threading.Event(), threading.Event()

    assert list(iterate(numbers(whole))) == [0, 1, 2]
    for number in iterate(numbers(broken)):
        assert number == 0
        break
    assert whole.is_set()
    assert broken.wait(10)


def test_an_iteration_that_is_forgotten_is_closed_whichever_thread_collects_it() -> None:
    closed = threading.Event()
    forgotten = [iterate(numbers(closed))]
    assert next(forgotten[0]) == 0

    async def collect() -> None:
        forgotten.clear()

    block_on(collect())

    assert closed.wait(10)


def test_an_error_reaches_the_caller() -> None:
    async def failing() -> None:
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        block_on(failing())


def test_blocking_inside_the_loop_is_refused_instead_of_waiting_for_ever() -> None:
    async def blocking() -> None:
        block_on(thread_name())

    with pytest.raises(RuntimeError, match="asynchronous client"):
        block_on(blocking())


async def test_a_cancelled_caller_cancels_what_it_waits_for() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.create_task(await_at_home(endless))
    assert await asyncio.to_thread(begun.wait, 10)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(cancelled.wait, 10)
