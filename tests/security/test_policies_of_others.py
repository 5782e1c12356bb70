"""Policies of another project: nobody else sees or calls them, and no run takes a name that is in use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.errors import PermissionDenied, QuotaExceeded, RouteExists, RouteNotFound, SettingsInvalid
from fulmen.ids import ALL_PROJECTS
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, completion_service_pb2, route_pb2, route_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.llm_proxy.v1.completion_service_pb2_grpc import CompletionServiceStub
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceStub
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.security.test_hostile_resources import until_loaded
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.services import serving, target_of
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project

A, B = "projects/a", "projects/b"
OURS, SHARED, PUBLIC = "support", "assistant", "gpt-4o"
"""A policy of A; the operator's route that falls back on it; the operator's route of a vendor's model."""
MAX_NAMES, MAX_RUNS = 3, 2
DEMONSTRATION = b'{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a caller sees of the proxy: routes by model, backends by name, and the names of those with health."""

    routes: dict[str, route_pb2.Route]
    backends: dict[str, backend_pb2.Backend]
    health: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    proxy: RunningProxy
    store: StoreHandle
    vendor: Backend

    def key(self, project: str, role: Role = Role.CLIENT) -> str:
        return self.store.token(role, project=project)

    async def put(self, model: str, *, project: str = "", backend: str = "one", **fields: object) -> route_pb2.Route:
        target = route_pb2.RouteTarget(backend=f"backends/{backend}", policy="" if model == PUBLIC else model, weight=1)
        route = route_pb2.Route(name=f"routes/{model}", targets=[target], project=project, **fields)  # type: ignore[arg-type]
        return (await self.proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))).route

    async def models(self, key: str) -> set[str]:
        async with self.proxy.http.get(
            f"{self.proxy.url}/models", headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            return {each["id"] for each in (await answer.json())["data"]}

    async def complete(self, key: str, model: str, project: str = "") -> int:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()
        request = completion_service_pb2.CompleteRequest(path="/v1/chat/completions", body_json=body, project=project)
        async with open_channel(target_of(self.proxy.parts), token=key) as channel:
            return int((await CompletionServiceStub(channel).Complete(request)).http_status)

    async def seen(self, key: str) -> Seen:
        async with open_channel(target_of(self.proxy.parts), token=key) as channel:
            routes = (await RouteServiceStub(channel).ListRoutes(route_service_pb2.ListRoutesRequest())).routes
            stub = BackendServiceStub(channel)
            backends = (await stub.ListBackends(backend_service_pb2.ListBackendsRequest())).backends
            health = (await stub.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest())).backends
        return Seen(
            routes={each.name.removeprefix("routes/"): each for each in routes},
            backends={each.name: each for each in backends},
            health=[each.name for each in health],
        )


@pytest.fixture
async def world(store: StoreHandle, stubs: Stubs) -> AsyncIterator[World]:
    async with (
        Backend() as vendor,
        running_proxy(store.target, signing_key=SIGNING_KEY, retry_deadline_s=1, project_max_routes=MAX_NAMES) as proxy,
    ):
        for project in (A, B):
            await create_project(stubs, project)
        await until_loaded(proxy)
        await proxy.register("one", vendor.url)
        made = World(proxy=proxy, store=store, vendor=vendor)
        await made.put(OURS, project=A)
        await made.put(PUBLIC)
        yield made


async def test_a_policy_is_listed_and_called_by_its_project_alone(world: World) -> None:
    ours, theirs = world.key(A), world.key(B)
    assert await world.models(ours) == {OURS, PUBLIC}
    assert await world.models(theirs) == {PUBLIC}
    assert await world.models(world.key(ALL_PROJECTS, Role.SERVICE)) == {OURS, PUBLIC}
    for key, expected in ((ours, 200), (theirs, 404)):
        for model, status in ((OURS, expected), (PUBLIC, 200)):
            assert (await world.proxy.chat(key, model=model))[0] == status
            assert await world.complete(key, model) == status
    _, refusal = await world.proxy.chat(theirs, model=OURS)
    _, absent = await world.proxy.chat(theirs, model="absent")
    # What is another's looks like what does not exist, and the list of what does exist is the caller's own.
    assert str(refusal).replace(OURS, "absent") == str(absent)
    async with world.proxy.http.get(
        f"{world.proxy.url}/models/{OURS}", headers={"Authorization": f"Bearer {theirs}"}
    ) as answer:
        assert answer.status == 404


async def test_an_attempt_of_another_project_does_not_reach_a_policy(world: World) -> None:
    stubs = await world.store.stubs(role=Role.RUNNER, project=B)
    await create(await world.store.stubs(role=Role.CLIENT, project=B))
    (held,) = await (await Runner(stubs).open()).take(1)
    assert (await world.proxy.chat(held.attempt_key, model=OURS))[0] == 404
    assert world.vendor.received == []


async def test_a_fallback_does_not_lead_to_the_policy_of_another_project(world: World) -> None:
    await world.proxy.register("closed", "http://127.0.0.1:1/v1")
    await world.put(SHARED, backend="closed", fallbacks=[f"routes/{OURS}"])
    statuses = [(await world.proxy.chat(world.key(project), model=SHARED))[0] for project in (A, B)]
    assert statuses == [200, 502]
    assert len(world.vendor.received) == 1


async def test_a_service_calls_for_a_project_what_the_project_may_call(world: World) -> None:
    service = world.key(ALL_PROJECTS, Role.SERVICE)
    assert await world.complete(service, OURS) == 200
    assert await world.complete(service, OURS, project=A) == 200
    assert await world.complete(service, OURS, project=B) == 404
    with pytest.raises(PermissionDenied):
        await world.complete(world.key(B), OURS, project=A)


async def test_a_route_of_a_project_or_of_the_operator_is_taken_by_no_other_project(world: World) -> None:
    for model in (OURS, PUBLIC):
        with pytest.raises(RouteExists, match=f"'{model}' is in use outside {B}"):
            await world.put(model, project=B)
    # The operator's change keeps the project, a run's keeps the recording; a removed name is free.
    assert (await world.put(OURS, fallbacks=[f"routes/{PUBLIC}"])).project == A
    recorded = await world.put(OURS, recording=route_pb2.Recording(sample_rate=1))
    assert (await world.put(OURS, project=A)).recording == recorded.recording
    await world.proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=f"routes/{OURS}"))
    assert (await world.put(OURS, project=B)).project == B


async def test_a_project_uses_up_so_many_names_and_no_more(world: World) -> None:
    for number in range(MAX_NAMES):
        await world.put(f"name-{number}", project=B)
    with pytest.raises(QuotaExceeded, match="project_max_routes") as refused:
        await world.put("one-more", project=B)
    assert (refused.value.metadata["project"], refused.value.metadata["quota"]) == (B, "project_routes")
    # What it has may change; another project, and the operator, have names of their own.
    await world.put("name-0", project=B, fallbacks=[f"routes/{PUBLIC}"])
    await world.put("another", project=A)
    for number in range(MAX_NAMES + 1):
        await world.put(f"vendor-{number}")
    await world.proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/name-0"))
    assert (await world.put("one-more", project=B)).project == B


async def test_a_route_that_leads_to_an_engine_of_one_project_never_leads_to_anothers(world: World) -> None:
    # The engine of A's policy has made room, its route is gone, and an operator's canary still leads to its backend.
    await world.proxy.register("engine-support", world.vendor.url, project=A)
    await world.put(SHARED, backend="engine-support")
    with pytest.raises(RouteExists, match=f"'engine-support' is in use outside {B}"):
        await world.proxy.register("engine-support", "http://127.0.0.1:1/v1", project=B)
    await world.proxy.register("engine-support", world.vendor.url)
    assert (await world.proxy.chat(world.key(A), model=SHARED))[0] == 200
    with pytest.raises(RouteExists):
        await world.proxy.register("engine-support", "http://127.0.0.1:1/v1", project=B)
    with pytest.raises(RouteExists):
        await world.proxy.register("one", "http://127.0.0.1:1/v1", project=B)


@pytest.mark.parametrize("role", [Role.READER, Role.CLIENT])
async def test_a_reader_sees_the_routes_and_backends_that_its_project_may_use_without_addresses(
    world: World, role: Role
) -> None:
    await world.proxy.register("engine-support", world.vendor.url, project=A, key_name="k", headers={"X-Team": "t"})
    await world.put(OURS, backend="engine-support")
    await world.put(SHARED, fallbacks=[f"routes/{OURS}"], overrides=[
        route_pb2.ModeOverride(mode="train", request_fields_json='{"user": "secret"}')
    ])  # fmt: skip
    ours, theirs = await world.seen(world.key(A, role)), await world.seen(world.key(B, role))
    assert list(ours.routes) == [SHARED, PUBLIC, OURS]
    assert list(theirs.routes) == [SHARED, PUBLIC]
    assert ours.routes[SHARED].fallbacks == [f"routes/{OURS}"]
    assert theirs.routes[SHARED].fallbacks == []
    assert list(ours.backends) == list(ours.health) == ["backends/engine-support", "backends/one"]
    assert list(theirs.backends) == list(theirs.health) == ["backends/one"]
    shown = [*ours.routes.values(), *ours.backends.values()]
    assert not any(text in str(shown) for text in ("http", "X-Team", "key_name", "secret"))
    assert (await world.seen(world.key(ALL_PROJECTS, Role.SERVICE))).backends["backends/one"].base_url


async def test_a_reader_does_not_learn_of_what_its_project_may_not_use(world: World) -> None:
    await world.proxy.register("engine-support", world.vendor.url, project=A)
    # An operator's canary leads to the engine of A.
    await world.put(SHARED, backend="engine-support")
    theirs = await world.seen(world.key(B, Role.READER))
    assert list(theirs.routes[SHARED].targets) == [route_pb2.RouteTarget(weight=1)]
    assert theirs.backends.keys() == {"backends/one"}
    async with open_channel(target_of(world.proxy.parts), token=world.key(B, Role.READER)) as channel:
        stub = RouteServiceStub(channel)
        with pytest.raises(RouteNotFound) as refused:
            await stub.GetRoute(route_service_pb2.GetRouteRequest(name=f"routes/{OURS}"))
        assert refused.value.metadata["served"] == f"{SHARED}, {PUBLIC}"
        watch = stub.WatchRoutes(route_service_pb2.WatchRoutesRequest())
        first = await anext(aiter(watch))
        assert [each.name for each in first.routes] == [f"routes/{SHARED}", f"routes/{PUBLIC}"]
        # What becomes another project's is gone, and what was never seen goes unseen.
        await world.proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=f"routes/{OURS}"))
        await world.proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=f"routes/{SHARED}"))
        change = await anext(aiter(watch))
        assert (list(change.routes), list(change.removed)) == ([], [f"routes/{SHARED}"])
        with pytest.raises(PermissionDenied):
            await stub.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=f"routes/{PUBLIC}"))


async def test_a_run_is_refused_the_name_of_a_model_outside_its_project(
    world: World, stubs: Stubs, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        targets = {"model_roots": "/", "llm_proxy_target": target_of(world.proxy.parts), "project_max_runs": MAX_RUNS}
        parts = await stack.enter_async_context(serving("algorithm", world.store, tmp_path, **targets))
        runs = {}
        for project in (A, B):
            version = resource_pb2.ResourceVersion(
                name="resources/said", kind="dataset", content=DEMONSTRATION, project=project
            )
            await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
            channel = await stack.enter_async_context(open_channel(target_of(parts), token=world.key(project)))
            runs[project] = TrainingRunServiceStub(channel)

        async def create_run(project: str, policy: str, *, settings: str = "") -> str:
            run = training_run_pb2.TrainingRun(
                algorithm="sft",
                project=project,
                settings_json=settings,
                policy=training_run_pb2.PolicySpec(name=policy, path=str(tmp_path)),
                inputs={"demonstrations": "resources/said/versions/1"},
            )
            request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run)
            return (await runs[project].CreateTrainingRun(request)).training_run.name

        for policy in (OURS, PUBLIC):
            with pytest.raises(SettingsInvalid) as refused:
                await create_run(B, policy, settings='{"steps": -1}')
            assert {each.field for each in refused.value.violations} == {"policy.name", "settings.steps"}
        assert await create_run(A, OURS)
        # A name that an unfinished run of another project will serve is in use, too.
        assert await create_run(A, "later")
        with pytest.raises(SettingsInvalid, match="not valid") as refused:
            await create_run(B, "later")
        assert [each.field for each in refused.value.violations] == ["policy.name"]
        assert (await runs[B].ListTrainingRuns(training_run_service_pb2.ListTrainingRunsRequest())).training_runs == []
        # Nor does it use up more names than runs that it may have.
        with pytest.raises(QuotaExceeded, match="project_max_runs") as full:
            await create_run(A, "latest")
        assert (full.value.metadata["project"], full.value.metadata["quota"]) == (A, "project_runs")
        assert await create_run(B, "latest")
