"""gRPC health: alive from start to stop, ready while all that is needed is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fulmen_service_kit.lifecycle import ServiceParts, run_inside
from fulmen_service_kit.settings import ServiceSettings
from tests.support.service_kit import sample_service

LIMIT_S = 30
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ALIVE, READY, ONE_SERVICE = "", "fulmen.sample.v1", sample_service.SERVICE


class Needed:
    """Something that the service is of no use without."""

    def __init__(self) -> None:
        self.problem = "it is away"


Asked = tuple[Needed, health_pb2_grpc.HealthStub]


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    """Yields what a running service needs, and a probe of its health."""
    needed, stop, ready = Needed(), asyncio.Event(), tmp_path / "ready.json"

    async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
        parts = await sample_service.build(settings, stack)
        parts.server.readiness.add("store", lambda: needed.problem)
        parts.server.readiness.add("collector", lambda: "it is away, too", is_needed=False)
        return parts

    settings = sample_service.SampleSettings(signing_key="k" * 32, ready_file=str(ready))
    running = asyncio.create_task(run_inside(settings, build, stop))
    async with asyncio.timeout(LIMIT_S):
        while not ready.exists():  # noqa: ASYNC110  # written by the service
            await asyncio.sleep(0.02)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{json.loads(ready.read_text())['port']}") as channel:
        yield needed, health_pb2_grpc.HealthStub(channel)
    stop.set()
    assert await running == 0


async def statuses(probe: health_pb2_grpc.HealthStub) -> list[int]:
    """Returns the health of the service, of its readiness and of one of its rpc services."""
    found = []
    for name in (ALIVE, READY, ONE_SERVICE):
        answer = await probe.Check(health_pb2.HealthCheckRequest(service=name))
        found.append(int(answer.status))
    return found


async def test_a_service_without_what_it_needs_is_alive_and_not_ready(asked: Asked) -> None:
    needed, probe = asked
    assert await statuses(probe) == [SERVING, NOT_SERVING, NOT_SERVING]
    for problem, status in (("", SERVING), ("gone again", NOT_SERVING), ("", SERVING)):
        needed.problem = problem
        async with asyncio.timeout(LIMIT_S):
            while await statuses(probe) != [SERVING, status, status]:  # noqa: ASYNC110  # told within a moment
                await asyncio.sleep(0.05)


async def test_watchers_receive_the_change(asked: Asked) -> None:
    needed, probe = asked
    watch = probe.Watch(health_pb2.HealthCheckRequest(service=READY))
    async with asyncio.timeout(LIMIT_S):
        assert (await watch.read()).status == NOT_SERVING
        needed.problem = ""
        assert (await watch.read()).status == SERVING
    watch.cancel()
