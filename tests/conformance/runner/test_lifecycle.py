"""Deaths and farewells: of the store, of the runner, of the proxy."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2 as messages
from fulmen.runner.v1 import runner_service_pb2_grpc
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.fixtures import World
from tests.support.runner.harness import RunnerProcess, rollouts_of, token

ASKING = """
from openai import AsyncOpenAI
client = AsyncOpenAI(max_retries=0, timeout=60)
async def solve(task, context):
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "who am I?"}])
    return float(answer.choices[0].message.content == context.attempt)
"""


async def waiting(
    world: World, count: int, *, max_attempts: int = 3, **settings: Any
) -> tuple[RunnerProcess, list[str]]:
    """Starts a runner; returns it and its rollouts when the model calls of as many as it may run wait at the proxy."""
    agent = await world.publish({"agent.py": ASKING}, python="agent.py:solve")
    runner = await world.start(**settings)
    world.proxy.holding = True
    names = await world.store.create(rollouts_of(agent, [{}] * count, max_attempts=max_attempts))
    await world.proxy.until_waiting(min(count, settings.get("slots", count)))
    return runner, names


async def test_results_survive_a_death_of_the_store_and_count_once(world: World) -> None:
    runner, names = await waiting(world, 20)
    await world.store.kill()
    world.proxy.release()
    await runner.logged("attempt_finished", count=20)
    await runner.logged("lease_stream_broken")
    await world.store.revive()
    ended = await world.store.ended(names)
    assert [[(e.kind, e.rewards) for e in ended[name]] for name in names] == [[("", {("reward", None): 1.0})]] * 20
    assert (await runner.logged("session_opened", count=2))["resumed"] is True


@pytest.mark.long(short=True)
async def test_another_runner_finishes_what_a_killed_one_began(world: World) -> None:
    first, names = await waiting(world, 10)
    first.send(signal.SIGKILL)
    await first.exit_code()
    world.proxy.release()
    await world.start()
    ended = await world.store.ended(names)
    assert [[e.kind for e in ended[name]] for name in names] == [["LEASE_LOST", ""]] * 10


async def test_sigterm_finishes_within_the_grace_and_exits_0(world: World) -> None:
    runner, [name] = await waiting(world, 1, drain_grace_s=30)
    runner.send(signal.SIGTERM)
    await runner.logged("draining")
    world.proxy.release()
    assert await runner.exit_code() == 0
    assert [ended.kind for ended in (await world.store.ended([name]))[name]] == [""]


async def test_a_drain_gives_back_what_does_not_finish_and_takes_nothing_new(world: World) -> None:
    runner, names = await waiting(world, 3, max_attempts=1, drain_grace_s=1, slots=2)
    runner.send(signal.SIGTERM)
    assert await runner.exit_code() == 0
    world.proxy.release()
    await world.start()
    ended = await world.store.ended(names)
    kinds = sorted([e.kind for e in ended[name]] for name in names)
    assert kinds == [[""], ["RELEASED", ""], ["RELEASED", ""]]


async def test_the_rpcs_of_a_runner(world: World) -> None:
    runner, names = await waiting(world, 3, slots=1)
    port = (await runner.ports())["port"]
    async with open_channel(f"127.0.0.1:{port}", token=token(Role.CLIENT)) as channel:
        with pytest.raises(PermissionDenied):
            await runner_service_pb2_grpc.RunnerServiceStub(channel).Drain(messages.DrainRequest())
    async with open_channel(f"127.0.0.1:{port}", token=token()) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        assert (await stub.SetSlots(messages.SetSlotsRequest(slot_count=3))).slot_count == 3
        await world.proxy.until_waiting(3)
        status = await stub.GetStatus(messages.GetStatusRequest())
        assert (status.slot_count, len(status.running), status.draining) == (3, 3, False)
        assert status.runner.startswith("runners/")
        with pytest.raises(ArgumentInvalid):
            await stub.SetSlots(messages.SetSlotsRequest(slot_count=0))
        assert not status.slots.automatic
        answer = await stub.SetSlots(messages.SetSlotsRequest(automatic=True))
        assert (answer.slot_count, answer.automatic) == (3, True)
        with pytest.raises(ArgumentInvalid):
            await stub.SetSlots(messages.SetSlotsRequest(slot_count=3, automatic=True))
        stacks = (await stub.DumpStacks(messages.DumpStacksRequest())).text
        assert "thread MainThread" in stacks
        # Three attempts wait at the same line of the agent, which is shown without what it holds.
        assert re.search(r"3 tasks: projects/default/rollouts/.*\n(  .*\n)*  .*agent\.py:\d+ solve\n", stacks)
        assert "eyJ" not in stacks
        assert (await stub.Drain(messages.DrainRequest())).running_count == 3
        assert (await stub.GetStatus(messages.GetStatusRequest())).draining is True
        world.proxy.release()
        assert await runner.exit_code() == 0
    ended = await world.store.ended(names)
    assert [[e.kind for e in ended[name]] for name in names] == [[""]] * 3


async def test_lost_captures_make_an_attempt_infra(world: World) -> None:
    _, [name] = await waiting(world, 1)
    world.proxy.lost = True
    world.proxy.release()
    assert [ended.kind for ended in (await world.store.ended([name]))[name]] == ["INFRA", ""]


async def test_attempts_wait_for_a_proxy_that_is_away(world: World) -> None:
    agent = await world.publish({"agent.py": ASKING}, python="agent.py:solve")
    await world.proxy.stop_grpc()
    runner = await world.start()
    [name] = await world.store.create(rollouts_of(agent, [{}]))
    await runner.logged("attempt_started")
    await world.proxy.start_grpc()
    assert [ended.kind for ended in (await world.store.ended([name]))[name]] == [""]
