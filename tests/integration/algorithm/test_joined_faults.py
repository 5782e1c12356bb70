"""Engines of other machines, which are network namespaces: they fetch from each other, and what fails costs no call."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fulmen.llm_proxy.v1 import backend_service_pb2
from tests.support.algorithm.joined_engines import (
    Agent,
    Publishing,
    elsewhere,
    open_world,
    started_publishing,
    weight_agent,
)
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.training import BUILDER
from tests.support.end_to_end import World
from tests.support.machines import AVAILABLE, SERVICE, Machines

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="needs Linux, root, ip and nsenter"),
    pytest.mark.serial,
    pytest.mark.timeout(900),
]
SHORT = pytest.mark.long(short=True)
LONG = pytest.mark.long

COUNT = 3
LARGER = BUILDER.replace(b"hidden=16, layers=1, heads=2, mlp=16", b"hidden=128, layers=2, heads=2, mlp=256")
CALLERS = 8
LOST_S = 90.0
ANSWER_LIMIT = aiohttp.ClientTimeout(total=120)


class Site:
    """Machines with an engine each, in a chain: each fetches from the one before."""

    def __init__(self, world: World, machines: Machines, folder: Path, stack: AsyncExitStack) -> None:
        self.world, self.machines = world, machines
        self.folder, self._stack = folder, stack
        self.agents: list[Agent] = []

    def agent(self, run: Publishing, **settings: object) -> Any:
        """Returns an agent of the next machine, to be entered."""
        number = len(self.agents)
        values = {**elsewhere(self.world, service=SERVICE, own=self.machines.address(number)), **settings}
        within = self.machines.within(number)
        return weight_agent(self.world, run.run, self.folder / f"gpu-{number}", within=within, **values)

    async def joins(self, run: Publishing) -> Agent:
        """Has the next machine's engine join a run, and waits until it serves."""
        agent: Agent = await self._stack.enter_async_context(self.agent(run))
        self.agents.append(agent)
        await agent.until_loaded(run.version)
        return agent

    async def chain(self, repository_root: Path, name: str) -> Publishing:
        """Begins a run whose engines have all joined, and have fetched a version from each other."""
        run = await started_publishing(self.world, repository_root, name, self.folder)
        for _ in range(COUNT):
            await self.joins(run)
        version = await run.published()
        for number, agent in enumerate(self.agents):
            loaded = await agent.until_loaded(version)
            assert loaded["peer_bytes"] == (loaded["fetched_bytes"] if number else 0)
        return run

    async def engines(self, run: Publishing, count: int) -> None:
        """Waits until the run has so many engines, its own included."""
        await run.until(lambda found: found.ready_engine_count == found.engine_count == count, f"{count} engines serve")

    async def stale_version(self, run: Publishing) -> int:
        """Returns the oldest version that an engine of a run has proved; 0 if none has."""
        answer = await self.world.client.backends.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest())
        return max(each.stale_version for each in answer.backends if each.name.endswith(f"-{run.policy}"))


@asynccontextmanager
async def calls(world: World, model: str) -> AsyncIterator[list[list[int]]]:
    """Calls a model through the proxy until the block ends; yields each caller's statuses, and fails if one was bad."""
    statuses: list[list[int]] = [[] for _ in range(CALLERS)]
    url = f"{world.stack.targets['llm_proxy_http']}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {world.stack.client_token}"}
    body = {"model": model, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8}

    async def call(client: aiohttp.ClientSession, own: list[int]) -> None:
        while True:
            async with client.post(url, json=body, headers=headers) as answer:
                await answer.read()
                own.append(answer.status)

    async with aiohttp.ClientSession(timeout=ANSWER_LIMIT) as client:
        tasks = [asyncio.create_task(call(client, own)) for own in statuses]
        try:
            yield statuses
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in ended if not isinstance(each, asyncio.CancelledError)] == []
    assert {status for own in statuses for status in own} == {200}


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines(COUNT) as made:
        yield made


@pytest.fixture
async def site(machines: Machines, short_tmp_path: Path, tmp_path: Path) -> AsyncIterator[Site]:
    hosts = [machines.address(number) for number in range(COUNT)]
    async with (
        open_world(short_tmp_path, hosts, FULMEN_ALGORITHM_ENGINE_FAN_OUT="1") as world,
        AsyncExitStack() as stack,
    ):
        yield Site(world, machines, tmp_path, stack)


@LONG
async def test_an_agent_that_is_lost_in_the_middle_of_the_chain_or_hangs_there_delays_the_others_alone(
    site: Site, repository_root: Path
) -> None:
    run = await site.chain(repository_root, "middle")
    async with calls(site.world, run.policy):
        # It accepts what comes, and answers nothing; its engine goes on.
        site.agents[1].process.send_signal(signal.SIGSTOP)
        version = await run.published()
        loaded = await site.agents[2].until_loaded(version)
        assert loaded["peer_bytes"] < loaded["fetched_bytes"]
        await site.engines(run, 3)
        site.agents[1].process.send_signal(signal.SIGCONT)
        await site.engines(run, 4)
        version = await run.published()
        await site.agents[1].until_loaded(version)
        site.machines.kill(1)
        await site.engines(run, 3)
        version = await run.published()
        loaded = await site.agents[2].until_loaded(version)
        assert loaded["peer_bytes"] == loaded["fetched_bytes"]


@LONG
async def test_a_machine_that_is_cut_off_in_the_middle_of_versions_is_missed_and_comes_back(
    site: Site, repository_root: Path
) -> None:
    run = await site.chain(repository_root, "cut")
    async with calls(site.world, run.policy):
        site.machines.cut_off(1)
        run.order()
        version = await run.published()
        await site.agents[2].until_loaded(version)
        await site.engines(run, 3)
        site.machines.reconnect(1)
        await site.engines(run, 4)
        version = await run.published()
        await site.agents[1].until_loaded(version)
    # The engine served on: it was not started again.
    assert len(site.agents[1].events("engine_ended")) == 0


@LONG
async def test_an_engine_that_the_proxy_alone_does_not_reach_costs_no_call(site: Site, repository_root: Path) -> None:
    run = await site.chain(repository_root, "apart")
    async with calls(site.world, run.policy) as statuses:
        site.machines.silence(2, site.agents[2].port)
        before = [len(own) for own in statuses]
        for _ in range(3):
            await run.published()

        async def all_go_on() -> bool:
            return all(len(own) >= count + 20 for own, count in zip(statuses, before, strict=True))

        # Nobody waits at the silent engine.
        await eventually(all_go_on, what="all callers go on", deadline_s=LOST_S)


@LONG
async def test_a_second_engine_of_the_same_name_waits_and_one_that_joins_amid_versions_gets_the_newest(
    site: Site, repository_root: Path
) -> None:
    run = await started_publishing(site.world, repository_root, "names", site.folder)
    await site.joins(run)
    async with site.agent(run, engine_id="gpu-0") as second:
        version = await run.published()
        await site.agents[0].until_loaded(version)
        await eventually(lambda: _refused(second), what="the second is refused", deadline_s=LOST_S)
        assert second.loaded() == []
        # The name is free when the first one is gone. Meanwhile versions come without a break.
        site.machines.kill(0)
        for _ in range(5):
            run.order()
        await second.until_loaded(run.version)
        assert second.loaded() == sorted({*second.loaded()})


async def _refused(agent: Agent) -> bool:
    return any("gpu-0" in each["reason"] for each in agent.events("stream_ended"))


@SHORT
async def test_a_line_that_is_too_slow_for_every_version_gets_some_of_them_and_holds_up_nobody(
    site: Site, repository_root: Path
) -> None:
    run = await started_publishing(site.world, repository_root, "slow", site.folder, builder=LARGER)
    await site.joins(run)
    await site.joins(run)
    site.machines.slow_down(1, mbit=0.256, both_ways=False)
    for _ in range(4):
        version = await run.published()
    assert site.agents[0].loaded()[-1] == version
    behind = site.agents[1].loaded()[-1]
    assert behind < version
    site.machines.slow_down(1, mbit=100, both_ways=False)
    await site.agents[1].until_loaded(version)
    await site.engines(run, 3)
    # It was never started again for being slow.
    assert len(site.agents[1].events("weights_ordered")) == len(site.agents[1].loaded())
