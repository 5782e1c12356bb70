"""Orders that come through the store: a real store, and a runner process that carries them out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest_asyncio

from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen.store.v1 import runner_registry_service_pb2_grpc
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.fixtures import Store, World
from tests.support.runner.harness import rollouts_of, token
from tests.support.runner.stores import FINAL_TIMEOUT_S, RealStore

ASKING = """
import os, urllib.request
def solve(task, context):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b'{"model": "m"}')
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    urllib.request.urlopen(request).read()
    return 1.0
"""
Stub = runner_registry_service_pb2_grpc.RunnerRegistryServiceStub


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    """Yields a real store that serves."""
    async with RealStore(database_url) as real:
        yield real


@pytest_asyncio.fixture
async def registry(world: World) -> AsyncIterator[Stub]:
    """Yields the registry of the store."""
    async with open_channel(world.store.target, token=token(Role.ADMIN)) as channel:
        yield Stub(channel)


async def until(registry: Stub, wanted: Callable[[list[pb.Runner]], bool]) -> list[pb.Runner]:
    async with asyncio.timeout(FINAL_TIMEOUT_S):
        while not wanted(found := list((await registry.ListRunners(pb.ListRunnersRequest())).runners)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found


async def test_slots_that_are_ordered_are_set_at_the_runner(world: World, registry: Stub) -> None:
    agent = await world.publish({"agent.py": ASKING}, python="agent.py:solve")
    await world.start(slots=1)
    [runner] = await until(registry, bool)
    names = await world.store.create(rollouts_of(agent, [{} for _ in range(3)]))
    world.proxy.holding = True
    await world.proxy.until_waiting(1)
    await registry.SetRunnerSlots(pb.SetRunnerSlotsRequest(name=runner.name, slot_count=3))
    await world.proxy.until_waiting(3)
    # Confirmed at once; shown with the first measurement of the machine.
    await until(registry, lambda found: not found[0].order_pending and found[0].load.slots.limit_count == 3)
    await registry.SetRunnerSlots(pb.SetRunnerSlotsRequest(name=runner.name, automatic=True))
    await until(registry, lambda found: not found[0].order_pending and found[0].load.slots.automatic)
    world.proxy.release()
    ended = await world.store.ended(names)
    assert [[each.kind for each in ended[name]] for name in names] == [[""]] * 3


async def test_a_runner_that_is_ordered_to_drain_finishes_its_attempts_and_exits(world: World, registry: Stub) -> None:
    agent = await world.publish({"agent.py": ASKING}, python="agent.py:solve")
    runner = await world.start(slots=1)
    [registered] = await until(registry, bool)
    world.proxy.holding = True
    names = await world.store.create(rollouts_of(agent, [{}, {}]))
    await world.proxy.until_waiting(1)
    await registry.DrainRunner(pb.DrainRunnerRequest(name=registered.name))
    [draining] = await until(registry, lambda found: not found[0].order_pending)
    assert draining.order.HasField("drain")
    world.proxy.release()
    assert await runner.exit_code() == 0
    await until(registry, lambda found: not found)
    # The second one was never taken.
    await world.start(slots=1)
    ended = await world.store.ended(names)
    assert [[each.kind for each in ended[name]] for name in names] == [[""]] * 2
