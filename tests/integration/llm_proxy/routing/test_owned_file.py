"""What a file owns: two proxies on one store serve its set, and no other request changes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from fulmen.errors import ArgumentInvalid, ManagedByFile, RouteExists
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import POLICY, RunningProxy, running_proxy
from tests.support.store.running import LIMIT_S, SIGNING_KEY, running_store

FILE = "proxy.toml"
RUN = "projects/default"


@dataclass(kw_only=True)
class World:
    """Two proxies on a store, a model server behind them, and the key of an app."""

    proxies: tuple[RunningProxy, RunningProxy]
    server: Backend
    key: str

    def backend(self, name: str, **fields: object) -> backend_pb2.Backend:
        return backend_pb2.Backend(name=f"backends/{name}", base_url=self.server.url, **fields)  # type: ignore[arg-type]

    async def apply(
        self,
        backends: Sequence[backend_pb2.Backend] = (),
        routes: Sequence[route_pb2.Route] = (),
        *,
        file: str = FILE,
        at: int = 0,
    ) -> tuple[list[str], list[str], list[str]]:
        """Applies a set at one of the proxies; returns what was added, changed and deleted."""
        request = route_service_pb2.ApplyFileRequest(file=file, backends=backends, routes=routes)
        answer = await self.proxies[at].routes.ApplyFile(request)
        return list(answer.added), list(answer.changed), list(answer.deleted)

    async def routes(self, at: int = 0) -> dict[str, route_pb2.Route]:
        answer = await self.proxies[at].routes.ListRoutes(route_service_pb2.ListRoutesRequest(page_size=1000))
        return {each.name: each for each in answer.routes}

    async def backends(self) -> dict[str, backend_pb2.Backend]:
        answer = await self.proxies[0].backends.ListBackends(backend_service_pb2.ListBackendsRequest(page_size=1000))
        return {each.name: each for each in answer.backends}


def route(model: str, *backends: str, policy: str = "", version: int = 0, **fields: object) -> route_pb2.Route:
    targets = [
        route_pb2.RouteTarget(
            backend=f"backends/{each}", backend_model="byte-model", weight=1, policy=policy, policy_version=version
        )
        for each in backends
    ]
    return route_pb2.Route(name=f"routes/{model}", targets=targets, **fields)  # type: ignore[arg-type]


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """Yields the world of these tests."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(database_url))
        server = await stack.enter_async_context(Backend())
        first, second = [
            await stack.enter_async_context(running_proxy(store.target, signing_key=SIGNING_KEY)) for _ in range(2)
        ]
        async with asyncio.timeout(LIMIT_S):
            await first.loaded()
            await second.loaded()
        yield World(proxies=(first, second), server=server, key=store.token(Role.CLIENT, project=RUN))


async def test_a_set_is_served_by_every_proxy_and_what_differs_is_published(world: World) -> None:
    one = [world.backend("a"), world.backend("b")], [route("chat", "a"), route("judge", "b", fallbacks=["routes/chat"])]
    assert await world.apply(*one) == (["backends/a", "backends/b", "routes/chat", "routes/judge"], [], [])
    for proxy in world.proxies:
        status, answer = await proxy.chat(world.key, model="judge")
        assert (status, answer["object"]) == (200, "chat.completion")
    assert await world.apply(*one, at=1) == ([], [], [])

    other = [world.backend("a", max_in_flight=3), world.backend("c")], [route("chat", "c"), route("new", "a")]
    added, changed, deleted = await world.apply(*other, at=1)
    assert added == ["backends/c", "routes/new"]
    assert changed == ["backends/a", "routes/chat"]
    assert deleted == ["routes/judge", "backends/b"]
    assert (await world.proxies[1].chat(world.key, model="judge"))[0] == 404
    assert (await world.proxies[0].chat(world.key, model="new"))[0] == 200


async def test_no_other_request_changes_what_a_file_owns(world: World) -> None:
    await world.apply([world.backend("a")], [route("chat", "a", policy=POLICY, version=1)])
    first = world.proxies[0]
    refused = [
        first.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route("chat", "a"))),
        first.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/chat")),
        first.routes.RollbackRoute(route_service_pb2.RollbackRouteRequest(name="routes/chat", version=1)),
        first.routes.SplitTraffic(route_service_pb2.SplitTrafficRequest(name="routes/chat", weights={"backends/a": 5})),
        first.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=world.backend("a"))),
        first.backends.DeleteBackend(backend_service_pb2.DeleteBackendRequest(name="backends/a")),
    ]
    for call in refused:
        with pytest.raises(
            ManagedByFile, match=r"proxy\.toml owns .*: change it there, then run `fulmen proxy apply"
        ) as error:
            await call
        assert error.value.metadata["file"] == FILE
    taken = route("chat", "a", project=RUN)
    with pytest.raises(RouteExists):
        await first.routes.PutRoute(route_service_pb2.PutRouteRequest(route=taken))
    assert (await world.routes())["routes/chat"].version == 1


async def test_promoted_versions_drains_and_holds_outlast_the_next_set(world: World) -> None:
    owned = [world.backend("a"), world.backend("b")], [route("chat", "a", "b", policy=POLICY, version=1)]
    await world.apply(*owned)
    first = world.proxies[0]
    await first.routes.PromoteVersion(route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=7))
    await first.backends.DrainBackend(backend_service_pb2.DrainBackendRequest(name="backends/a"))
    await first.backends.HoldBackend(backend_service_pb2.HoldBackendRequest(name="backends/b"))
    assert await world.apply(*owned) == ([], [], [])

    changed = [world.backend("a", max_in_flight=9), world.backend("b", max_in_flight=9)]
    assert (await world.apply(changed, owned[1]))[1] == ["backends/a", "backends/b"]
    backends = await world.backends()
    assert backends["backends/a"].draining
    assert backends["backends/b"].HasField("hold_until_time")
    assert {each.policy_version for each in (await world.routes())["routes/chat"].targets} == {7}

    moved = backend_pb2.Backend(name="backends/b", base_url="http://127.0.0.1:9/v1")
    await world.apply([changed[0], moved], owned[1])
    assert not (await world.backends())["backends/b"].HasField("hold_until_time")


async def test_a_set_with_problems_changes_nothing_and_tells_all_of_them(world: World) -> None:
    await world.apply([world.backend("a")], [route("chat", "a")])
    await world.apply([world.backend("x")], [route("theirs", "x")], file="other.toml")
    first = world.proxies[0]
    for model in ("policy", "kept"):
        theirs = route(model, "a", project=RUN)
        await first.routes.PutRoute(route_service_pb2.PutRouteRequest(route=theirs))

    bad = [
        backend_pb2.Backend(name="backends/b", base_url="nowhere"),
        world.backend("x"),
        world.backend("x"),
    ]
    routes = [
        route("policy", "x"),
        route("theirs", "y", fallbacks=["routes/none"]),
        route("chat", "b", recording=route_pb2.Recording(
            sample_rate=1, patterns=[route_pb2.RedactionPattern(name="all", expression="x*")]
        )),
    ]  # fmt: skip
    with pytest.raises(ArgumentInvalid, match=r"proxy\.toml cannot be applied") as error:
        await world.apply(bad, routes)

    assert {(each.field, each.description) for each in error.value.violations} == {
        ("backends", "backends/x occurs 2 times"),
        ("backends[0].base_url", "is not of the form http://host:port/v1, without credentials"),
        ("routes[1].targets[0].backend", "'backends/y' is not a backend of the file"),
        ("routes[1].fallbacks[0]", "'routes/none' is not a route of the file"),
        ("routes[2].recording.patterns[0].expression", "matches the empty text"),
        ("backends[1].name", "backends/x belongs to other.toml"),
        ("backends[2].name", "backends/x belongs to other.toml"),
        ("routes[0].name", f"routes/policy belongs to a training run of {RUN}"),
        ("routes[1].name", "routes/theirs belongs to other.toml"),
        ("backends", "backends/a is in use by routes/kept, which the file does not own"),
    }
    assert (await world.routes())["routes/chat"].version == 1
    assert (await world.proxies[1].chat(world.key, model="chat"))[0] == 200

    with pytest.raises(ArgumentInvalid, match="file"):
        await world.apply(file="a/b.toml")


async def test_a_file_leads_no_policy_through_litellm(world: World) -> None:
    first = world.proxies[0]
    vendor = world.backend("a", dialect=backend_pb2.DIALECT_LITELLM, provider="gemini")
    with pytest.raises(ArgumentInvalid) as error:
        await world.apply([vendor], [route("trained", "a", policy=POLICY)])
    assert [each.field for each in error.value.violations] == ["routes[0].targets[0].policy"]

    await first.register("a", world.server.url)
    await first.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route("trained", "a", policy=POLICY)))
    with pytest.raises(ArgumentInvalid, match=r"backends/a: the policy of routes/trained"):
        await world.apply([vendor], [route("chat", "a")])


async def test_a_file_takes_over_what_an_operator_has_put_and_an_empty_set_deletes_it(world: World) -> None:
    first = world.proxies[0]
    await first.register("a", world.server.url, returns_token_ids=False)
    await first.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route("chat", "a")))
    await first.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route("mine", "a")))

    owned = [world.backend("a")], [route("chat", "a")]
    assert await world.apply(*owned) == ([], ["backends/a", "routes/chat"], [])
    with pytest.raises(ArgumentInvalid, match="backends/a is in use by routes/mine"):
        await world.apply()
    await first.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/mine"))
    assert await world.apply() == ([], [], ["routes/chat", "backends/a"])
    assert await world.apply() == ([], [], [])

    restored = await first.backends.RegisterBackend(
        backend_service_pb2.RegisterBackendRequest(backend=world.backend("a", file=FILE))
    )
    assert restored.backend.file == ""
    request = route_service_pb2.RollbackRouteRequest(name="routes/chat", version=2)
    assert (await first.routes.RollbackRoute(request)).route.file == ""


async def test_more_than_the_store_takes_at_once_is_published_in_an_order_that_works(world: World) -> None:
    names = [f"m{number:03}" for number in range(150)]
    added, changed, deleted = await world.apply(
        [world.backend(each) for each in names], [route(each, each) for each in names]
    )
    assert (len(added), changed, deleted) == (300, [], [])
    assert (await world.proxies[1].chat(world.key, model="m149"))[0] == 200
    assert len((await world.apply())[2]) == 300
    assert await world.routes() == {}
