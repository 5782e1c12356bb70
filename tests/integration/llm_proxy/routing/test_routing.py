"""Routes are swapped without a failed call, follow the store, and outlive its absence."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from fulmen.errors import (
    ArgumentInvalid,
    BackendInUse,
    BackendNotFound,
    PermissionDenied,
    ResourceNotFound,
    RouteNotFound,
    TokenInvalid,
)
from fulmen.llm_proxy.v1 import (
    backend_service_pb2,
    route_pb2,
    route_service_pb2,
    route_service_pb2_grpc,
)
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, POLICY, RunningProxy, running_proxy, target

DEADLINE_S = 30


async def test_a_swap_under_load_fails_no_call_and_later_calls_go_to_the_new_place(
    proxy: RunningProxy, backend: Backend
) -> None:
    _, key = proxy.attempt()
    statuses: list[int] = []
    done = asyncio.Event()

    async def agent() -> None:
        while not done.is_set():
            status, _ = await proxy.chat(key)
            statuses.append(status)

    async with asyncio.timeout(DEADLINE_S), Backend() as second:
        await proxy.register("two", second.url)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(agent())
            for number in range(10):
                await proxy.put_route(target("two" if number % 2 == 0 else "one", version=number + 2))
            await proxy.put_route(target("two", version=20))
            before = len(backend.received)
            await proxy.chat(key)
            done.set()
        assert set(statuses) == {200}
        assert len(second.received) > 0
    # Only calls that had begun before the swap may still have gone to the old place.
    assert len(backend.received) - before <= 4


async def test_a_call_in_flight_ends_where_it_began(proxy: RunningProxy, backend: Backend, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), Backend() as second:
        await proxy.register("two", second.url)
        call = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        await proxy.put_route(target("two", version=2))
        backend.switches.gate.set()
        assert (await call)[0] == 200
        await proxy.chat(key)
        await proxy.flush(attempt)
    first, later = (record for _, record in store.spans(attempt))
    assert (first.policy_versions[0].version, later.policy_versions[0].version) == (1, 2)


async def test_a_backend_that_restarts_within_the_retry_window_fails_no_call(
    proxy: RunningProxy, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    async with asyncio.timeout(DEADLINE_S):
        backend.switches.gate = asyncio.Event()
        in_flight = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        await backend.stop()
        fresh = [asyncio.create_task(proxy.chat(key)) for _ in range(3)]
        backend.switches.gate.set()
        await backend.start()
        results = await asyncio.gather(in_flight, *fresh)
    summary = await proxy.flush(attempt)
    assert [status for status, _ in results] == [200] * 4
    assert (summary.call_count, summary.infra_failure_count, summary.unusable_count) == (4, 0, 0)


async def test_refusals_and_broken_connections_are_retried_before_the_first_byte_only(
    proxy: RunningProxy, backend: Backend
) -> None:
    _, key = proxy.attempt()
    backend.switches.refusals.extend([503, 503])
    assert (await proxy.chat(key))[0] == 200
    assert len(backend.received) == 3
    backend.switches.drop_next = 2
    assert (await proxy.chat(key))[0] == 200
    assert len(backend.received) == 6
    backend.switches.refusals.append(501)
    assert (await proxy.chat(key))[0] == 501
    assert len(backend.received) == 7
    backend.switches.cut_after_events = 3
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        await answer.content.read()
    assert len(backend.received) == 8


async def test_a_backend_that_stays_away_is_an_infra_failure_named_as_such(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_url=backend.url, retry_deadline_s=0.2) as proxy:
        attempt, key = proxy.attempt()
        await backend.stop()
        status, answer = await proxy.chat(key)
        summary = await proxy.flush(attempt)
        health = await proxy.health()
    assert status == 502
    assert answer["error"]["source"] == "backend"
    assert answer["error"]["code"] == "backend_unavailable"
    assert "127.0.0.1" not in answer["error"]["message"]
    assert summary.infra_failure_count == 1
    assert health.failure_count >= 1


async def test_a_draining_backend_gets_no_new_call(proxy: RunningProxy, backend: Backend) -> None:
    async with Backend() as second:
        await proxy.register("two", second.url)
        await proxy.put_route(target("one"), target("two"))
        answer = await proxy.backends.DrainBackend(backend_service_pb2.DrainBackendRequest(name="backends/one"))
        assert answer.backend.draining
        for _ in range(8):
            _, key = proxy.attempt()
            assert (await proxy.chat(key))[0] == 200
        assert len(second.received) == 8
    assert backend.received == []


async def test_a_promotion_changes_the_version_of_every_route_of_the_policy_and_rolls_back(
    proxy: RunningProxy, store: FakeStore
) -> None:
    await proxy.put_route(target("one", version=1), model="second")
    promoted = await proxy.routes.PromoteVersion(
        route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=5)
    )
    assert {route.name: route.targets[0].policy_version for route in promoted.routes} == {
        "routes/second": 5,
        f"routes/{MODEL}": 5,
    }
    attempt, key = proxy.attempt()
    await proxy.chat(key)
    back = await proxy.routes.RollbackRoute(route_service_pb2.RollbackRouteRequest(name=f"routes/{MODEL}"))
    await proxy.chat(key)
    await proxy.flush(attempt)
    assert (back.route.version, back.route.targets[0].policy_version) == (3, 1)
    assert [record.policy_versions[0].version for _, record in store.spans(attempt)] == [5, 1]
    with pytest.raises(RouteNotFound):
        await proxy.routes.PromoteVersion(route_service_pb2.PromoteVersionRequest(policy="nobody", policy_version=5))
    with pytest.raises(ResourceNotFound):
        await proxy.routes.RollbackRoute(route_service_pb2.RollbackRouteRequest(name="routes/second", version=9))


async def test_a_promotion_of_a_lower_version_is_told(proxy: RunningProxy) -> None:
    request = route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=5)
    for version, replaced in ((5, 0), (5, 0), (3, 5), (4, 0)):
        request.policy_version = version
        with structlog.testing.capture_logs() as logs:
            assert (await proxy.routes.PromoteVersion(request)).replaced_version == replaced
        told = [each for each in logs if each["event"] == "lower_version_promoted"]
        assert [(each["version"], each["replaced_version"]) for each in told] == (
            [(version, replaced)] if replaced else []
        )
    assert proxy.metric("lower_promotions_total") == 1


async def test_a_promotion_at_one_backend_leaves_targets_of_others(proxy: RunningProxy) -> None:
    await proxy.register("other", "http://127.0.0.1:1/v1")
    route = await proxy.put_route(target("one", version=1), target("other", version=1), model="second")
    request = route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=5, backend="backends/other")
    [promoted] = (await proxy.routes.PromoteVersion(request)).routes
    assert (promoted.name, [each.policy_version for each in promoted.targets]) == (route.name, [1, 5])
    request.backend = "backends/none"
    with pytest.raises(RouteNotFound, match=f"'{POLICY}' at backends/none"):
        await proxy.routes.PromoteVersion(request)


async def test_two_replicas_that_promote_at_once_keep_each_others_change(proxy: RunningProxy, store: FakeStore) -> None:
    other = target("one", version=1)
    other.policy = "other"
    await proxy.put_route(target("one", version=1), other)
    route = route_pb2.Route.FromString(store.versions[f"route.{MODEL}"][-1].content)
    route.targets[1].policy_version = 7
    for _ in range(2):
        faster = resource_pb2.ResourceVersion()
        faster.CopyFrom(store.versions[f"route.{MODEL}"][-1])
        faster.content = route.SerializeToString()
        store.faster.append(faster)
    promoted = await proxy.routes.PromoteVersion(
        route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=5)
    )
    assert [one.policy_version for one in promoted.routes[0].targets] == [5, 7]
    kept = route_pb2.Route.FromString(store.versions[f"route.{MODEL}"][-1].content)
    assert [one.policy_version for one in kept.targets] == [5, 7]


async def test_a_replica_that_is_behind_acts_on_what_another_has_just_published(
    proxy: RunningProxy, store: FakeStore
) -> None:
    known = set(store.watchers)
    async with asyncio.timeout(DEADLINE_S), running_proxy(store.target) as behind:
        while not store.watchers - known:  # noqa: ASYNC110  (the double tells nobody)
            await asyncio.sleep(0.01)
        store.slow = store.watchers - known
        await proxy.register("new", "http://127.0.0.1:1/v1")
        assert (await behind.put_route(target("new"), model="new")).targets[0].backend == "backends/new"

        route = await proxy.put_route(target("new", policy="other"), model="newer")
        promote = route_service_pb2.PromoteVersionRequest(policy="other", policy_version=5)
        assert [each.name for each in (await behind.routes.PromoteVersion(promote)).routes] == [route.name]

        await proxy.put_route(target("new"), model="newest")
        await behind.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/newest"))
        assert store.versions["route.newest"][-1].content == b""

        await proxy.register("newest", "http://127.0.0.1:1/v1")
        hold = backend_service_pb2.HoldBackendRequest(name="backends/newest")
        assert (await behind.backends.HoldBackend(hold)).backend.HasField("hold_until_time")
        await proxy.register("unused", "http://127.0.0.1:1/v1")
        await behind.backends.DeleteBackend(backend_service_pb2.DeleteBackendRequest(name="backends/unused"))
        assert store.versions["backend.unused"][-1].content == b""


async def test_a_route_that_another_replica_has_just_published_is_served_at_once(
    proxy: RunningProxy, store: FakeStore
) -> None:
    known = set(store.watchers)
    async with asyncio.timeout(DEADLINE_S), running_proxy(store.target) as behind:
        while not store.watchers - known:  # noqa: ASYNC110  (the double tells nobody)
            await asyncio.sleep(0.01)
        store.slow = store.watchers - known
        _, key = behind.attempt()
        assert (await behind.chat(key, model="new"))[0] == 404
        await proxy.put_route(target("one"), model="new")
        answers = await asyncio.gather(*(behind.chat(key, model="new") for _ in range(20)))
        assert [status for status, _ in answers] == [200] * 20
        await proxy.put_route(target("one"), model="newer")
        headers = {"Authorization": f"Bearer {key}"}
        async with behind.http.get(f"{behind.url}/models/newer", headers=headers) as answer:
            assert answer.status == 200


async def test_a_conversation_that_nobody_names_stays_with_its_variant(proxy: RunningProxy, backend: Backend) -> None:
    app = proxy.signer.issue(Role.CLIENT, subject="app", ttl_s=600)
    async with asyncio.timeout(DEADLINE_S), Backend() as canary:
        await proxy.register("two", canary.url)
        await proxy.put_route(target("one", weight=1), target("two", version=2, weight=1))
        went: list[set[bool]] = []
        for number in range(20):
            messages = [{"role": "user", "content": f"question {number}"}]
            places = set()
            for _ in range(4):
                before = len(canary.received)
                status, answer = await proxy.chat(app, messages=messages)
                assert status == 200
                places.add(len(canary.received) > before)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
            went.append(places)
    assert sorted(map(len, went)) == [1] * 20, "no conversation changes its variant"
    assert set.union(*went) == {True, False}, "both variants have some"


async def test_putting_the_same_route_again_changes_nothing(proxy: RunningProxy) -> None:
    first = await proxy.put_route(target("one", version=3))
    again = await proxy.put_route(target("one", version=3))
    listed = await proxy.routes.ListRoutes(route_service_pb2.ListRoutesRequest())
    got = await proxy.routes.GetRoute(route_service_pb2.GetRouteRequest(name=f"routes/{MODEL}"))
    assert first == again == listed.routes[0] == got.route


async def test_malformed_routes_and_backends_are_refused(proxy: RunningProxy) -> None:
    with pytest.raises(BackendNotFound):
        await proxy.put_route(target("nobody"))
    for problem in (
        {"overrides": {"train": '{"messages": []}'}},
        {"overrides": {"train": "[]"}},
        {"overrides": {"production": "{}"}},
        {"model": "Upper Case"},
    ):
        with pytest.raises(ArgumentInvalid):
            await proxy.put_route(target("one"), **problem)
    with pytest.raises(ArgumentInvalid):
        await proxy.put_route()
    for url in ("", "ftp://host", "http://host/v1?key=1"):
        with pytest.raises(ArgumentInvalid):
            await proxy.register("two", url)


async def test_only_services_may_change_routes(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    port = proxy.parts.server.port
    runner = proxy.signer.issue(Role.RUNNER, subject="r", ttl_s=60)
    for token, error in ((key, PermissionDenied), (runner, PermissionDenied), (None, TokenInvalid)):
        async with open_channel(f"127.0.0.1:{port}", token=token) as channel:
            stub = route_service_pb2_grpc.RouteServiceStub(channel)
            with pytest.raises(error):
                await stub.ListRoutes(route_service_pb2.ListRoutesRequest())


async def test_a_watch_of_the_routes_begins_with_all_and_goes_on_with_changes(proxy: RunningProxy) -> None:
    async with asyncio.timeout(DEADLINE_S):
        watch = proxy.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest())
        first = await watch.read()
        await proxy.put_route(target("one", version=9))
        second = await watch.read()
        watch.cancel()
    assert (first.snapshot_complete, [route.name for route in first.routes]) == (True, [f"routes/{MODEL}"])
    assert second.routes[0].targets[0].policy_version == 9


async def test_while_the_store_is_away_the_last_table_serves_and_then_follows_again(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    async with asyncio.timeout(DEADLINE_S):
        await store.stop()
        for _ in range(3):
            assert (await proxy.chat(key))[0] == 200
        route = route_pb2.Route(name="routes/added", targets=[target("one")])
        store.publish(
            resource_pb2.ResourceVersion(name="resources/route.added", kind="route", content=route.SerializeToString())
        )
        await store.start()
        watch = proxy.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest())
        seen: set[str] = set()
        while "routes/added" not in seen:
            seen |= {route.name for route in (await watch.read()).routes}
        watch.cancel()
        summary = await proxy.flush(attempt)
    assert (summary.flushed, summary.call_count) == (True, 3)
    assert len(store.spans(attempt)) == 3


async def test_a_malformed_resource_leaves_the_route_as_it_was(proxy: RunningProxy, store: FakeStore) -> None:
    async with asyncio.timeout(DEADLINE_S):
        store.publish(resource_pb2.ResourceVersion(name=f"resources/route.{MODEL}", kind="route", content=b"\xff\xff"))
        await proxy.put_route(target("one"), model="other")
        _, key = proxy.attempt()
        assert (await proxy.chat(key))[0] == 200


async def test_traffic_is_split_by_backend_or_by_policy_version(proxy: RunningProxy) -> None:
    async with Backend() as second:
        await proxy.register("two", second.url)
        await proxy.put_route(target("one", version=1), target("two", version=2, weight=0))
        split = route_service_pb2.SplitTrafficRequest(name=f"routes/{MODEL}", version_weights={1: 0, 2: 1})
        answer = await proxy.routes.SplitTraffic(split)
        assert [t.weight for t in answer.route.targets] == [0, 1]
        _, key = proxy.attempt()
        assert (await proxy.chat(key))[0] == 200
        assert len(second.received) == 1
        split = route_service_pb2.SplitTrafficRequest(name=f"routes/{MODEL}", weights={"backends/one": 3})
        answer = await proxy.routes.SplitTraffic(split)
        assert [t.weight for t in answer.route.targets] == [3, 1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "weights"),
        ({"weights": {"backends/one": 1}, "version_weights": {1: 1}}, "weights"),
        ({"weights": {"backends/x": 1, "backends/one": 0}}, "backends/x"),
        ({"version_weights": {7: 1}}, "7"),
        ({"weights": {"backends/one": -1}}, "weight"),
    ],
)
async def test_a_split_that_cannot_be_is_refused_and_changes_nothing(
    proxy: RunningProxy, fields: dict, named: str
) -> None:
    before = await proxy.routes.GetRoute(route_service_pb2.GetRouteRequest(name=f"routes/{MODEL}"))
    with pytest.raises(ArgumentInvalid) as refused:
        await proxy.routes.SplitTraffic(route_service_pb2.SplitTrafficRequest(name=f"routes/{MODEL}", **fields))
    assert any(named in violation.field for violation in refused.value.violations)
    assert await proxy.routes.GetRoute(route_service_pb2.GetRouteRequest(name=f"routes/{MODEL}")) == before


async def test_a_removed_route_is_gone_everywhere_and_can_be_rolled_back(proxy: RunningProxy, store: FakeStore) -> None:
    name = f"routes/{MODEL}"
    _, key = proxy.attempt()
    async with asyncio.timeout(DEADLINE_S), running_proxy(store.target) as other:
        watch = other.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest())
        assert [route.name for route in (await watch.read()).routes] == [name]
        for _ in range(2):
            await proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=name))
        assert (await proxy.chat(key))[0] == 404
        assert list((await watch.read()).removed) == [name]
        watch.cancel()
        assert (await other.chat(key))[0] == 404
        assert list((await proxy.routes.ListRoutes(route_service_pb2.ListRoutesRequest())).routes) == []
        with pytest.raises(RouteNotFound):
            await proxy.routes.GetRoute(route_service_pb2.GetRouteRequest(name=name))
        await proxy.routes.RollbackRoute(route_service_pb2.RollbackRouteRequest(name=name))
        assert (await proxy.chat(key))[0] == 200


async def test_a_backend_is_removed_only_when_no_route_names_it(proxy: RunningProxy) -> None:
    request = backend_service_pb2.DeleteBackendRequest(name="backends/one")
    with pytest.raises(BackendInUse, match=f"routes/{MODEL}"):
        await proxy.backends.DeleteBackend(request)
    await proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=f"routes/{MODEL}"))
    for _ in range(2):
        await proxy.backends.DeleteBackend(request)
    assert list((await proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())).backends) == []


async def test_a_drain_is_taken_back(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    await proxy.backends.DrainBackend(backend_service_pb2.DrainBackendRequest(name="backends/one"))
    answer = await proxy.backends.ResumeBackend(backend_service_pb2.ResumeBackendRequest(name="backends/one"))
    assert not answer.backend.draining
    assert (await proxy.chat(key))[0] == 200
