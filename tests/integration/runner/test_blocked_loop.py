"""An async agent that blocks the runner's event loop costs no other attempt its lease, and is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.runner.fixtures import PublishAgent, StartRunner
from tests.support.runner.harness import SIGNING_KEY, rollouts_of
from tests.support.runner.store_double import StoreDouble
from tests.support.runner.stores import DoubleStore

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
async def store() -> AsyncIterator[DoubleStore]:
    """Yields a store whose leases are short."""
    double = StoreDouble(signing_key=SIGNING_KEY, lease_ttl_s=LEASE_TTL_S)
    await double.start()
    yield DoubleStore(double)
    await double.close()


async def start(store: DoubleStore, publish_agent: PublishAgent, folder: Path) -> list[str]:
    """Starts an agent that blocks, once the others beside it run; returns the rollouts, the one that blocks first."""
    agent = await publish_agent({"agent.py": AGENT}, python="agent.py:solve")
    common = {"begin": str(folder / "begin"), "end": str(folder / "end")}
    tasks = [{**common, "blocks": True}]
    tasks += [{**common, "blocks": False, "mine": str(folder / f"runs-{number}")} for number in range(BESIDE)]
    names = await store.create(rollouts_of(agent, tasks, timeout_s=120))
    await store.double.until(lambda: len(list(folder.glob("runs-*"))) == BESIDE)
    (folder / "begin").touch()
    return names


async def test_a_blocked_loop_loses_no_lease_and_the_log_says_who_blocks_it(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent, tmp_path: Path
) -> None:
    runner = await start_runner(slots=BESIDE + 1)
    names = await start(store, publish_agent, tmp_path)
    await store.double.until(lambda: store.double.renewal_count >= RENEWALS)
    (tmp_path / "end").touch()
    ended = await store.ended(names)
    assert {name: [(each.kind, each.message) for each in ended[name]] for name in names} == {
        name: [("", "")] for name in names
    }
    told = await runner.logged("event_loop_blocked")
    assert told["task"] == f"{names[0]}/attempts/1"
    assert "agent.py:10 solve" in told["stack"]
    assert store.double.stream_count == 1


async def test_a_loop_that_is_blocked_for_good_ends_the_runner_and_its_attempts_run_elsewhere(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent, tmp_path: Path
) -> None:
    runner = await start_runner(slots=BESIDE + 1, loop_blocked_limit_s=2)
    names = await start(store, publish_agent, tmp_path)
    assert await runner.exit_code() == 70
    assert "solve" in (await runner.logged("event_loop_blocked_for_good"))["stack"]
    (tmp_path / "end").touch()
    await start_runner(slots=BESIDE + 1)
    ended = await store.ended(names)
    assert {name: [each.kind for each in ended[name]] for name in names} == {name: ["LEASE_LOST", ""] for name in names}


async def test_a_runner_that_is_not_blocked_renews_on_its_stream_alone(
    store: DoubleStore, start_runner: StartRunner
) -> None:
    await start_runner()
    messages = store.double.message_count
    await store.double.until(lambda: store.double.message_count >= messages + RENEWALS)
    assert store.double.renewal_count == 0
