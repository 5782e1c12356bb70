"""A weight agent refuses what it does not understand or cannot fetch, says why, and starts no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1.engine_service_pb2_grpc import (
    EngineServiceServicer,
    EngineServiceStub,
    add_EngineServiceServicer_to_server,
)
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.membership import Membership
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.weight_agent.agent import WeightAgent
from tests.support.algorithm.fetched_versions import World, world

__all__ = ["world"]

LIMIT_S = 60
OPTIONS = EngineOptions(
    host="127.0.0.1", advertise_host="127.0.0.1", port=0, token="", torch_threads=1, device="cpu", max_batch_size=1
)


class Orders(EngineServiceServicer):
    """Orders one version, and notes what the agent says of it."""

    def __init__(self, order: pb.LoadWeights) -> None:
        self._order = order
        self.answer: asyncio.Future[pb.JoinEngineRequest] = asyncio.get_running_loop().create_future()

    async def JoinEngine(self, requests: AsyncIterator[pb.JoinEngineRequest], context: Any) -> AsyncIterator[Any]:
        yield pb.JoinEngineResponse(load=self._order)
        async for request in requests:
            if request.WhichOneof("message") in ("loaded", "refused") and not self.answer.done():
                self.answer.set_result(request)


@pytest.mark.parametrize(
    ("engine_json", "reason"),
    [
        ('{"kind": "embedded", "of_tomorrow": 1}', "another release"),
        ('{"kind": "of_tomorrow"}', "another release"),
        ('{"kind": "embedded"}', "does not exist"),
    ],
)
async def test_an_order_that_it_cannot_follow_is_refused_with_the_reason(
    world: World, tmp_path: Path, engine_json: str, reason: str
) -> None:
    name = "resources/policy.solver/versions/9"
    order = pb.LoadWeights(order=1, policy_version=name, kind=pb.WEIGHTS_KIND_FULL, engine_json=engine_json)
    service, server = Orders(order), grpc.aio.server()
    add_EngineServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    modules = ModuleStarter(warm=False)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        agent = WeightAgent(
            engines=EngineServiceStub(channel),
            hello=pb.EngineHello(engine_id="gpu-7"),
            options=OPTIONS,
            starter=EngineStarter(modules),
            fetcher=world.fetcher,
            membership=Membership(outage_limit_s=LIMIT_S),
        )
        running = asyncio.create_task(agent.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                answer = await service.answer
        finally:
            running.cancel()
            await asyncio.wait([running])
    await server.stop(None)
    modules.close()
    assert answer.refused.order == 1
    assert reason in answer.refused.reason
    assert world.kept() == set()
