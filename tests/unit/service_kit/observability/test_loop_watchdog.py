"""What holds the event loop up is named: the function, and the rpc or role that called it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time

import pytest
import structlog
import uvloop

from fulmen_service_kit.observability.loop_watchdog import LIMIT_S, Block, LoopWatchdog

LOOPS = [pytest.param(None, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
LIMIT_OF_TEST_S = 30.0
PROBES_S = 0.002
# The configuration of logs is the process's own.
LOGGING = """
import sys
from fulmen_service_kit.observability.logs import configure_logs
from fulmen_service_kit.observability.loop_watchdog import Block, BlockLog
configure_logs(service="tests", log_format=sys.argv[1], level="info")
BlockLog()(Block(place="a:b", work="/x/Y", stack=("c:d", "a:b"), seconds=0.5, computing=True))
"""
HEAVY = json.dumps([list(range(40)) for _ in range(1000)])


class Reports:
    """Blocks by this module's own functions: a process of many tests also stands still while it collects its garbage."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._some = threading.Event()

    def __call__(self, block: Block) -> None:
        if block.place.startswith(__name__):
            self.blocks.append(block)
            self._some.set()

    def some(self) -> bool:
        """Whether there is one."""
        return self._some.is_set()


def block_the_loop(seconds: float) -> None:
    """Waits as a blocking call does."""
    time.sleep(seconds)


def watched(loop_factory: object, work: object) -> list[Block]:
    """Runs a coroutine function in a loop with a watchdog until the first report, or its end."""
    reports = Reports()

    async def main() -> None:
        watchdog = LoopWatchdog(asyncio.get_running_loop(), interval_s=PROBES_S, report=reports)
        watchdog.start()
        try:
            await work(reports)  # type: ignore[operator]
        finally:
            watchdog.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        runner.run(main())
    return reports.blocks


async def until_reported(reports: Reports, block: object) -> None:
    """Blocks the loop again and again, as long as nothing was reported."""
    async with asyncio.timeout(LIMIT_OF_TEST_S):
        while not reports.some():
            await asyncio.sleep(0)
            block()  # type: ignore[operator]


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_blocking_call_is_named_with_its_task(loop_factory: object) -> None:
    async def work(reports: Reports) -> None:
        blocking = until_reported(reports, lambda: block_the_loop(3 * LIMIT_S))
        await asyncio.create_task(blocking, name="/fulmen.store.v1.RolloutService/GetRollout")

    block = watched(loop_factory, work)[0]

    assert block.place == f"{__name__}:block_the_loop"
    assert block.work == "/fulmen.store.v1.RolloutService/GetRollout"
    assert block.seconds > LIMIT_S
    assert not block.computing
    # Whoever called it, and nothing of what runs the loop.
    assert f"{__name__}:until_reported" in block.stack
    assert not any(place.startswith("asyncio.runners") for place in block.stack)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_long_computation_is_named_by_the_first_function_that_is_not_a_librarys(loop_factory: object) -> None:
    def compute() -> None:
        ends = time.thread_time() + 5 * LIMIT_S
        while time.thread_time() < ends:
            json.loads(HEAVY)

    async def work(reports: Reports) -> None:
        await until_reported(reports, compute)

    block = watched(loop_factory, work)[0]

    assert block.place.endswith("compute")
    assert block.work == ""


def test_a_loop_that_answers_is_not_reported_for_a_slow_task() -> None:
    async def work(reports: Reports) -> None:
        turns = asyncio.Event()
        asyncio.get_running_loop().call_later(10 * LIMIT_S, turns.set)
        await turns.wait()

    assert not watched(None, work)


def test_a_stopped_watchdog_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    async def work(reports: Reports) -> None:
        await asyncio.sleep(0)

    watched(None, work)

    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_OF_TEST_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_block_can_be_logged_in_every_format(log_format: str) -> None:
    logged = subprocess.run(
        [sys.executable, "-c", LOGGING, log_format], capture_output=True, text=True, timeout=LIMIT_OF_TEST_S, check=True
    ).stderr

    assert "loop_blocked" in logged
    assert "c:d" in logged


def test_a_place_that_blocks_again_and_again_is_logged_once_a_minute() -> None:
    async def work(reports: Reports) -> None:
        with structlog.testing.capture_logs() as events:
            watchdog = LoopWatchdog(asyncio.get_running_loop(), interval_s=PROBES_S)
            watchdog.start()
            await until_reported(reports, lambda: block_the_loop(3 * LIMIT_S))
            async with asyncio.timeout(LIMIT_OF_TEST_S):
                while not events:
                    await asyncio.sleep(0)
                    block_the_loop(3 * LIMIT_S)
            for _ in range(3):
                await asyncio.sleep(0)
                block_the_loop(3 * LIMIT_S)
            watchdog.stop()
        logged.extend(event for event in events if event["place"] == f"{__name__}:block_the_loop")

    logged: list[object] = []
    watched(None, work)

    assert [event["event"] for event in logged] == ["loop_blocked"]  # type: ignore[index]
