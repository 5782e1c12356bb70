"""While a backend is held its calls wait in the proxy, at every replica, and none fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid, BackendNotFound
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import POLICY, RunningProxy, running_proxy, target

DEADLINE_S = 30
NAME = "backends/one"


async def hold(proxy: RunningProxy, *, name: str = NAME, **ttl: int) -> backend_pb2.Backend:
    request = backend_service_pb2.HoldBackendRequest(name=name, ttl=Duration(**ttl) if ttl else None)
    return (await proxy.backends.HoldBackend(request)).backend


async def release(proxy: RunningProxy) -> backend_pb2.Backend:
    return (await proxy.backends.ReleaseBackend(backend_service_pb2.ReleaseBackendRequest(name=NAME))).backend


async def until_waiting(proxy: RunningProxy, count: int) -> None:
    """Returns when so many calls wait at a replica for the backend `one`."""
    async with asyncio.timeout(DEADLINE_S):
        while (await proxy.health()).waiting_count != count:
            pass


async def statuses(calls: list[asyncio.Task[tuple[int, dict[str, Any]]]]) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [(await call)[0] for call in calls]


async def test_calls_of_a_held_backend_wait_and_go_on_when_it_is_released(
    proxy: RunningProxy, backend: Backend
) -> None:
    keys = [proxy.attempt()[1] for _ in range(16)]
    held = await hold(proxy)
    assert held.HasField("hold_until_time")
    calls = [asyncio.create_task(proxy.chat(key)) for key in keys]
    await until_waiting(proxy, 16)
    assert backend.received == []

    released = await release(proxy)
    assert not released.HasField("hold_until_time")
    assert await statuses(calls) == [200] * 16
    await until_waiting(proxy, 0)


async def test_a_call_that_waited_is_recorded_with_the_version_that_was_promoted_meanwhile(
    proxy: RunningProxy, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    await hold(proxy)
    call = asyncio.create_task(proxy.chat(key))
    await until_waiting(proxy, 1)
    await proxy.routes.PromoteVersion(route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=2))
    await release(proxy)
    assert await statuses([call]) == [200]
    await proxy.flush(attempt)

    record = store.record(attempt)
    assert record.usable
    assert [r.version for r in record.policy_versions] == [2]


async def test_calls_in_flight_go_on_while_their_backend_is_held(proxy: RunningProxy, backend: Backend) -> None:
    _, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    call = asyncio.create_task(proxy.chat(key))
    await backend.arrived.acquire()
    await hold(proxy)
    backend.switches.gate.set()
    assert await statuses([call]) == [200]


async def test_a_hold_ends_by_itself(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    await hold(proxy, nanos=300_000_000)
    assert await statuses([asyncio.create_task(proxy.chat(key))]) == [200]


async def test_a_hold_that_is_set_again_moves_its_end(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    await hold(proxy)
    call = asyncio.create_task(proxy.chat(key))
    await until_waiting(proxy, 1)
    await hold(proxy, nanos=1_000_000)
    assert await statuses([call]) == [200]


async def test_a_hold_is_in_force_at_every_replica(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_url=backend.url) as first, running_proxy(store.target) as second:
        watch = second.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest(), wait_for_ready=True)
        while not (await watch.read()).routes:
            pass
        watch.cancel()
        await hold(first)
        answer = await second.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
        async with asyncio.timeout(DEADLINE_S):
            while not answer.backends[0].HasField("hold_until_time"):
                answer = await second.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
        call = asyncio.create_task(second.chat(second.attempt()[1]))
        await until_waiting(second, 1)
        assert backend.received == []
        await release(first)
        assert await statuses([call]) == [200]


async def test_a_server_that_refuses_while_it_is_paused_fails_no_call_of_a_held_backend(
    store: FakeStore, backend: Backend
) -> None:
    async with running_proxy(store.target, backend_url=backend.url, retry_deadline_s=0) as proxy:
        _, key = proxy.attempt()
        backend.switches.refusals.extend([503] * 100)
        assert (await proxy.chat(key))[0] == 503

        await hold(proxy)
        calls = [asyncio.create_task(proxy.chat(key)) for _ in range(8)]
        await until_waiting(proxy, 8)
        backend.switches.refusals.clear()
        await release(proxy)
        assert await statuses(calls) == [200] * 8


async def test_an_agent_that_leaves_while_its_call_waits_frees_its_place(proxy: RunningProxy, backend: Backend) -> None:
    _, key = proxy.attempt()
    await hold(proxy)
    call = asyncio.create_task(proxy.chat(key))
    await until_waiting(proxy, 1)
    call.cancel()
    await until_waiting(proxy, 0)
    await release(proxy)
    assert (await proxy.chat(key))[0] == 200
    assert len(backend.received) == 1


@pytest.mark.parametrize("ttl", [{"seconds": 0}, {"seconds": -1}, {"seconds": 601}])
async def test_a_hold_without_end_is_refused(proxy: RunningProxy, ttl: dict[str, int]) -> None:
    with pytest.raises(ArgumentInvalid):
        await hold(proxy, **ttl)


async def test_a_backend_that_is_not_there_cannot_be_held(proxy: RunningProxy) -> None:
    with pytest.raises(BackendNotFound):
        await hold(proxy, name="backends/none")


async def test_a_call_whose_backend_leaves_while_it_waits_falls_back(proxy: RunningProxy) -> None:
    async with Backend() as other:
        await proxy.register("other", other.url)
        await proxy.put_route(target("other", policy=""), model="spare")
        route = route_pb2.Route(name="routes/first", targets=[target(policy="")], fallbacks=["routes/spare"])
        await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
        await hold(proxy)
        call = asyncio.create_task(proxy.chat(proxy.attempt()[1], model="first"))
        await until_waiting(proxy, 1)
        await proxy.backends.DrainBackend(backend_service_pb2.DrainBackendRequest(name=NAME))
        assert await statuses([call]) == [200]
        assert len(other.received) == 1
