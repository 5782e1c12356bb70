"""An async agent that blocks the runner's event loop costs no other attempt its lease, and is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of
from tests.support.runner.store_double import StoreDouble

LEASE_TTL_S = 2.0
BESIDE = 8
# Renewals are a third of the TTL apart: so many take longer than the lease lives.
RENEWALS = 5

AGENT = """
import asyncio, time
from pathlib import Path

async def solve(task):
    if task["blocks"]:
        while not Path(task["begin"]).exists():
            await asyncio.sleep(0.01)
        while not Path(task["end"]).exists():
            time.sleep(0.05)
    else:
        Path(task["mine"]).touch()
        while not Path(task["end"]).exists():
            await asyncio.sleep(0.05)
    return 1
"""


@pytest_asyncio.fixture
async def store() -> AsyncIterator[StoreDouble]:
    """Yields a store whose leases are short."""
    async with StoreDouble(lease_ttl_s=LEASE_TTL_S) as double:
        yield double


async def start(world: World, folder: Path) -> list[str]:
    """Starts an agent that blocks, once the others beside it run; returns the rollouts, the one that blocks first."""
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve")
    common = {"begin": str(folder / "begin"), "end": str(folder / "end")}
    tasks = [{**common, "blocks": True}]
    tasks += [{**common, "blocks": False, "mine": str(folder / f"runs-{number}")} for number in range(BESIDE)]
    names = await world.store.create(rollouts_of(agent, tasks, timeout_s=120))
    await world.double.until(lambda: len(list(folder.glob("runs-*"))) == BESIDE)
    (folder / "begin").touch()
    return names


async def test_a_blocked_loop_loses_no_lease_and_the_log_says_who_blocks_it(world: World, tmp_path: Path) -> None:
    runner = await world.start(slots=BESIDE + 1)
    names = await start(world, tmp_path)
    await world.double.until(lambda: world.double.renewal_count >= RENEWALS)
    (tmp_path / "end").touch()
    ended = await world.store.ended(names)
    assert {name: [(each.kind, each.message) for each in ended[name]] for name in names} == {
        name: [("", "")] for name in names
    }
    told = await runner.logged("event_loop_blocked")
    assert told["task"] == f"{names[0]}/attempts/1"
    assert "agent.py:10 solve" in told["stack"]
    assert world.double.stream_count == 1


async def test_a_loop_that_is_blocked_for_good_ends_the_runner_and_its_attempts_run_elsewhere(
    world: World, tmp_path: Path
) -> None:
    runner = await world.start(slots=BESIDE + 1, loop_blocked_limit_s=2)
    names = await start(world, tmp_path)
    assert await runner.exit_code() == 70
    assert "solve" in (await runner.logged("event_loop_blocked_for_good"))["stack"]
    (tmp_path / "end").touch()
    await world.start(slots=BESIDE + 1)
    ended = await world.store.ended(names)
    assert {name: [each.kind for each in ended[name]] for name in names} == {name: ["LEASE_LOST", ""] for name in names}


async def test_a_runner_that_is_not_blocked_renews_on_its_stream_alone(world: World) -> None:
    await world.start()
    messages = world.double.message_count
    await world.double.until(lambda: world.double.message_count >= messages + RENEWALS)
    assert world.double.renewal_count == 0
