"""Nothing that is stored stops a service: it is refused before it is stored, and set aside where it is read (T2)."""

from __future__ import annotations

import asyncio
import contextlib

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, FulmenError
from fulmen.kinds import CHECKED_KINDS, content_problems
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as res
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs

URL = "http://127.0.0.1:1/v1"
GOOD = backend_pb2.Backend(name="backends/one", base_url=URL)


def backend(**fields: object) -> bytes:
    """Returns a backend with fields that a check refuses."""
    return backend_pb2.Backend(**({"name": "backends/evil", "base_url": URL} | fields)).SerializeToString()


def route(**fields: object) -> bytes:
    """Returns a route with fields that a check refuses."""
    whole = {"name": f"routes/{MODEL}", "targets": [route_pb2.RouteTarget(backend="backends/one")]} | fields
    return route_pb2.Route(**whole).SerializeToString()


HOSTILE = {
    "no message": ("backend", b"\xff\xff"),
    "a time after the year 9999": ("backend", backend(hold_until_time={"seconds": 10**15})),
    "a time before 1970": ("backend", backend(hold_until_time={"seconds": -(10**15)})),
    "nanoseconds that are none": ("backend", backend(hold_until_time={"nanos": -5})),
    "an unknown engine": ("backend", backend(engine=99)),
    "an unknown API": ("backend", backend(apis=[77])),
    "no address": ("backend", backend(base_url="file:///etc/passwd")),
    "a negative limit": ("backend", backend(max_in_flight=-1)),
    "a deadline without end": ("route", route(deadline={"seconds": 10**15})),
    "a deadline in the past": ("route", route(hedge_delay={"seconds": -(10**15)})),
    "no target": ("route", route(targets=[])),
    "a version below zero": ("route", route(targets=[{"backend": "backends/one", "policy_version": -(2**63)}])),
    "an unknown balancing": ("route", route(balancing=99)),
    "a route to itself": ("route", route(fallbacks=[f"routes/{MODEL}"])),
    "a policy without a path": ("policy", b"{}"),
    "a policy nested too deeply": ("policy", b"[" * 200_000),
    "an agent without an entry": (
        "agent",
        agent_spec_pb2.AgentSpec(bundle="resources/b/versions/1").SerializeToString(),
    ),
    "an agent of less than no memory": (
        "agent",
        agent_spec_pb2.AgentSpec(command={"argv": ["x"]}, limits={"memory_bytes": -1}).SerializeToString(),
    ),
    "a prompt that is no text": ("prompt", b"\xff"),
}


def publication(kind: str, content: bytes) -> res.PublishResourcesRequest:
    """Returns a request that publishes one version."""
    names = {"route": f"resources/route.{MODEL}", "backend": "resources/backend.evil"}
    version = resource_pb2.ResourceVersion(name=names.get(kind, f"resources/{kind}.evil"), kind=kind, content=content)
    return res.PublishResourcesRequest(resources=[version])


@pytest.mark.parametrize("what", HOSTILE)
async def test_the_store_refuses_what_no_service_could_read(store: StoreHandle, what: str) -> None:
    kind, content = HOSTILE[what]
    service = await store.stubs(role=Role.SERVICE)
    with pytest.raises(ArgumentInvalid) as refused:
        await service.resources.PublishResources(publication(kind, content))
    assert all(violation.field.startswith("resources[0].") for violation in refused.value.violations)
    listed = await service.resources.ListResourceVersions(res.ListResourceVersionsRequest())
    assert not listed.resources


async def stored_anyway(stubs: Stubs, database_url: str) -> None:
    """Stores every hostile route and backend, as an older release or a restored backup may have."""
    connection = await asyncpg.connect(database_url)
    try:
        for number, (kind, content) in enumerate(HOSTILE.values()):
            if kind not in ("route", "backend"):
                continue
            good = GOOD.SerializeToString() if kind == "backend" else route()
            version = resource_pb2.ResourceVersion(name=f"resources/{kind}.evil{number}", kind=kind, content=good)
            await stubs.resources.PublishResources(res.PublishResourcesRequest(resources=[version]))
            await connection.execute(
                "UPDATE resource_version SET content = $1 FROM resource"
                " WHERE resource.id = resource_version.resource_id AND resource.name = $2",
                content,
                f"{kind}.evil{number}",
            )
    finally:
        await connection.close()


async def test_a_proxy_starts_and_serves_beside_stored_bytes_that_it_cannot_read(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    await stored_anyway(stubs, database_url)
    async with Backend() as engine, running_proxy(store.target, signing_key=SIGNING_KEY) as proxy:
        await until_loaded(proxy)
        await proxy.register("one", engine.url)
        await proxy.put_route(target("one"))
        listed = await proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
        assert [each.name for each in listed.backends] == ["backends/one"]
        routes = await proxy.routes.ListRoutes(route_service_pb2.ListRoutesRequest())
        assert [each.name for each in routes.routes] == [f"routes/{MODEL}"]
        assert proxy.metric("unreadable_resources") == sum(kind in ("route", "backend") for kind, _ in HOSTILE.values())


async def until_loaded(proxy: RunningProxy) -> None:
    """Waits until the proxy has its table."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(FulmenError):
                await proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
                return
            await asyncio.sleep(0.05)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from([*CHECKED_KINDS, "other"]), content=st.binary(max_size=200))
def test_a_check_of_any_bytes_ends_in_a_list_of_problems(kind: str, content: bytes) -> None:
    assert isinstance(content_problems(kind, content), list)
