"""Automatic slots: when they change, what is reported, and who may set them."""

from __future__ import annotations

import aiohttp
import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied, TokenInvalid
from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2 as messages
from fulmen.runner.v1 import runner_service_pb2_grpc
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.runner.fixtures import World
from tests.support.runner.harness import SIGNING_KEY, rollouts_of, token
from tests.support.runner.stores import FINAL_TIMEOUT_S

AGENT = "def solve(task, context):\n    return 1.0\n"
PROJECT_TOKENS = [
    TokenSigner(SIGNING_KEY).issue(role, subject="tests", ttl_s=3600, project="projects/default")
    for role in (Role.ADMIN, Role.SERVICE, Role.RUNNER)
]
RPCS = {
    "GetStatus": messages.GetStatusRequest(),
    "Drain": messages.DrainRequest(),
    "SetSlots": messages.SetSlotsRequest(slot_count=1),
    "DumpStacks": messages.DumpStacksRequest(),
}


async def test_refused_model_calls_reduce_the_slots_until_they_are_set(world: World) -> None:
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve")
    world.proxy.throttled = 2
    runner = await world.start(slots="auto", slots_max=64)
    ports = await runner.ports()
    names = await world.store.create(rollouts_of(agent, [{} for _ in range(100)]))
    changed = await runner.logged("slots_changed")
    assert (changed["before"], changed["reason"]) == (16, "throttled")
    assert changed["after"] <= 11
    assert [ended.kind for ended in (await world.store.ended(names))[names[0]]] == [""]
    loads = world.double.loads
    await world.double.until(lambda: any(load.slots.automatic for load in loads), FINAL_TIMEOUT_S)
    told = next(load.slots for load in reversed(loads) if load.HasField("slots"))
    assert (told.configured_count, told.limit_count) == (64, changed["after"])
    async with open_channel(f"127.0.0.1:{ports['port']}", token=token()) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        status = await stub.GetStatus(messages.GetStatusRequest())
        last = status.slots.last_change
        assert (last.from_count, last.to_count, last.reason) == (16, changed["after"], "throttled")
        assert (status.slots.automatic, status.slots.min_count, status.slots.max_count) == (True, 1, 64)
        assert (await stub.SetSlots(messages.SetSlotsRequest(slot_count=5))).slot_count == 5
        await world.double.until(lambda: loads[-1].slots.limit_count == 5, FINAL_TIMEOUT_S)
        assert not loads[-1].slots.automatic
    url = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as page:
        metrics = await page.text()
    assert 'fulmen_runner_slot_changes_total{reason="throttled"} 1.0' in metrics
    assert "\nfulmen_runner_slots 5.0" in metrics
    assert "\nfulmen_runner_slots_automatic 0.0" in metrics


async def test_only_tokens_of_those_who_run_the_fleet_reach_a_runner(world: World) -> None:
    runner = await world.start()
    target = f"127.0.0.1:{(await runner.ports())['port']}"
    refused = [(bad, PermissionDenied) for bad in [*PROJECT_TOKENS, token(Role.CLIENT), token(Role.READER)]]
    for bad, error in [*refused, ("", TokenInvalid), ("nonsense", TokenInvalid)]:
        async with open_channel(target, token=bad) as channel:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            for rpc, request in RPCS.items():
                with pytest.raises(error):
                    await getattr(stub, rpc)(request)
    for good in (Role.RUNNER, Role.SERVICE, Role.ADMIN):
        async with open_channel(target, token=token(good)) as channel:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            assert not (await stub.GetStatus(messages.GetStatusRequest())).draining
            with pytest.raises(ArgumentInvalid):
                await stub.SetSlots(messages.SetSlotsRequest(slot_count=10_001))
