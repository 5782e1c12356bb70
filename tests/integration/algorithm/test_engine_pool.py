"""The engine pool: an engine per policy, eviction of the idlest, recovery after a restart."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fulmen.errors import FulmenError, RouteNotFound
from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import backend_service_pb2, route_pb2, route_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceServicer, add_BackendServiceServicer_to_server
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceServicer, add_RouteServiceServicer_to_server
from fulmen.rpc.channel import open_channel
from fulmen.rpc.status import STATUS_METADATA_KEY, encode
from fulmen_algorithm.engines.engine import EngineAddress, EngineFailed, EngineOptions, SwapGate
from fulmen_algorithm.engines.pool import EnginePool, RunServing
from fulmen_algorithm.engines.proxy_admin import MAX_BACKEND_ID, backend_id
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, EngineSettings, ExternalEngine
from fulmen_algorithm.policy.served import ServedPolicies
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats

FIRST_PORT = 9000
EMBEDDED = EmbeddedEngine()
WAIT_S = 30


class Proxy(BackendServiceServicer, RouteServiceServicer):
    def __init__(self) -> None:
        self.backends: dict[str, str] = {}
        self.routes: dict[str, int] = {}
        self.projects: dict[str, str] = {}
        self.news = asyncio.Condition()
        self.refusals = 0
        """How many registrations are refused from now on."""
        self.answers = asyncio.Event()
        self.answers.set()
        """Whether routes are deleted at once."""
        self.asked = asyncio.Event()

    async def RegisterBackend(self, request, context):
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        async with self.news:
            self.backends[request.backend.name] = request.backend.base_url
            self.news.notify_all()
        return backend_service_pb2.RegisterBackendResponse(backend=request.backend)

    async def HoldBackend(self, request, context):
        return backend_service_pb2.HoldBackendResponse()

    async def DeleteBackend(self, request, context):
        self.backends.pop(request.name, None)
        return backend_service_pb2.DeleteBackendResponse()

    async def GetRoute(self, request, context):
        if request.name not in self.routes:
            await refuse(RouteNotFound("There is no such route.", model=request.name), context)
        route = route_pb2.Route(name=request.name, project=self.projects[request.name])
        return route_service_pb2.GetRouteResponse(route=route)

    async def PutRoute(self, request, context):
        self.projects[request.route.name] = request.route.project
        self.routes[request.route.name] = request.route.targets[0].policy_version
        return route_service_pb2.PutRouteResponse(route=request.route)

    async def PromoteVersion(self, request, context):
        name = f"routes/{request.policy}"
        if name not in self.routes:
            await refuse(RouteNotFound("There is no such route.", policy=request.policy), context)
        self.routes[name] = request.policy_version
        return route_service_pb2.PromoteVersionResponse()

    async def DeleteRoute(self, request, context):
        self.asked.set()
        await self.answers.wait()
        self.routes.pop(request.name, None)
        return route_service_pb2.DeleteRouteResponse()


async def refuse(error: FulmenError, context: grpc.aio.ServicerContext) -> None:
    status = ((STATUS_METADATA_KEY, encode(error).SerializeToString()),)
    await context.abort(grpc.StatusCode.NOT_FOUND, error.message, status)


class LightEngine:
    """An engine without a model, which ends on request."""

    def __init__(self, port: int, proxy: Proxy) -> None:
        self.port = port
        self.proxy = proxy
        self.end = asyncio.Event()
        self.swaps: list[int] = []
        self.routed: list[tuple[dict[str, int], dict[str, int]]] = []
        """The proxy's routes when it took weights, and when these were promoted."""
        self.failures: list[Exception] = []

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(base_url=f"http://127.0.0.1:{self.port}/v1")

    async def ended(self) -> int:
        await self.end.wait()
        return 1

    async def sampled_tokens(self) -> int:
        return 7

    async def healthy(self) -> bool:
        return True

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        before = dict(self.proxy.routes)
        self.swaps.append(policy.version)
        if self.failures:
            raise self.failures.pop()
        await gate.promote()
        self.routed.append((before, dict(self.proxy.routes)))
        return SwapStats()

    async def stop(self) -> None:
        self.end.set()


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proxy = Proxy()
        self.started: list[tuple[str, int, LightEngine]] = []
        self.news = asyncio.Condition()
        self.failures: list[Exception] = []
        """What the next starts raise."""
        self.elsewhere: set[str] = set()
        """Policies that another service has run since."""

    async def start(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        gate: SwapGate,
    ) -> LightEngine:
        """Starts an engine; an external one promotes its version itself."""
        if self.failures:
            raise self.failures.pop()
        made = LightEngine(options.port, self.proxy)
        if isinstance(engine, ExternalEngine):
            await gate.promote()
            made.routed.append(({}, dict(self.proxy.routes)))
        async with self.news:
            self.started.append((policy.policy, policy.version, made))
            self.news.notify_all()
        return made

    async def until_started(self, count: int) -> None:
        """Waits until that many engines have started."""
        async with asyncio.timeout(WAIT_S), self.news:
            await self.news.wait_for(lambda: len(self.started) >= count)

    async def until_registered(self, backend: str) -> None:
        """Waits until the proxy knows a backend."""
        async with asyncio.timeout(WAIT_S), self.proxy.news:
            await self.proxy.news.wait_for(lambda: backend in self.proxy.backends)

    async def still_serves(self, policy: str) -> bool:
        """Returns whether no other service has run a policy since."""
        return policy not in self.elsewhere

    @asynccontextmanager
    async def pool(self, *, max_engines: int = 2) -> AsyncIterator[EnginePool]:
        options = EngineOptions(
            host="127.0.0.1", advertise_host="127.0.0.1", port=FIRST_PORT, token="", torch_threads=1, device="cpu",
            max_batch_size=1,
        )  # fmt: skip
        async with open_channel(self.target) as channel:
            pool = EnginePool(
                options,
                starter=self,
                proxy=channel,
                backend_prefix="engine",
                file=ServedPolicies(self.folder / "served.json"),
                max_engines=max_engines,
                outage_limit_s=5,
                still_serves=self.still_serves,
            )
            task = asyncio.create_task(pool.run())
            try:
                yield pool
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def serve(
        self,
        pool: EnginePool,
        policy: str,
        version: int = 1,
        engine: EngineSettings = EMBEDDED,
        project: str = DEFAULT_PROJECT,
    ) -> RunServing:
        run = f"{project}/trainingRuns/{policy}"
        serving = pool.serving(run, project, engine, lambda severity, text: None)
        await serving.serve(self.published(policy, version), {}, lambda severity, text: None)
        return serving

    def published(self, policy: str, version: int) -> PublishedPolicy:
        path = self.folder / f"{policy}-{version}"
        path.mkdir(exist_ok=True)
        return PublishedPolicy(name=f"resources/policy.{policy}/versions/{version}", version=version, path=path)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    server = grpc.aio.server()
    add_BackendServiceServicer_to_server(made.proxy, server)
    add_RouteServiceServicer_to_server(made.proxy, server)
    made.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(None)


async def test_each_policy_has_an_engine_a_backend_and_a_port_of_its_own(world):
    async with world.pool() as pool:
        await world.serve(pool, "a")
        second = await world.serve(pool, "b")
        assert world.proxy.backends == {
            "backends/engine-a": "http://127.0.0.1:9000/v1",
            "backends/engine-b": "http://127.0.0.1:9001/v1",
        }
        await second.swap(world.published("b", 2))
        assert [engine.swaps for _, _, engine in world.started] == [[], [2]]
        assert await second.sampled_tokens() == 7


async def test_a_model_name_in_use_outside_the_project_is_refused_before_any_engine_is_touched(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", project="projects/x")).release()
        world.proxy.routes["routes/b"], world.proxy.projects["routes/b"] = 0, ""
        for policy in ("a", "b"):
            with pytest.raises(RunFailed, match=f"{policy!r} is in use outside projects/y"):
                await world.serve(pool, policy, 2, project="projects/y")
        assert [(policy, version, engine.swaps) for policy, version, engine in world.started] == [("a", 1, [])]
        assert world.proxy.projects["routes/a"] == "projects/x"


async def test_a_name_whose_route_was_deleted_is_free_and_its_engine_gives_way(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", project="projects/x")).release()
        world.proxy.routes.clear()
        await world.serve(pool, "a", 2, project="projects/y")
        assert [(version, engine.end.is_set()) for _, version, engine in world.started] == [(1, True), (2, False)]
        assert world.proxy.projects["routes/a"] == "projects/y"


async def test_a_file_of_served_versions_that_cannot_be_read_stops_nothing(world):
    (world.folder / "served.json").write_text('[{"policy": 1}]')
    async with world.pool() as pool:
        await world.serve(pool, "a")
        assert [policy for policy, _, _ in world.started] == ["a"]


async def test_the_idlest_engine_of_an_ended_run_makes_room_and_no_other(world):
    async with world.pool() as pool:
        first, second = await world.serve(pool, "a"), await world.serve(pool, "b")
        with pytest.raises(RunFailed, match="All 2 engines"):
            await world.serve(pool, "c")
        second.release()
        first.release()
        await world.serve(pool, "c")
        assert set(world.proxy.routes) == {"routes/a", "routes/c"}
        assert world.proxy.backends["backends/engine-c"] == "http://127.0.0.1:9001/v1"
        assert [engine.end.is_set() for _, _, engine in world.started] == [False, True, False]


async def test_a_policy_whose_run_has_ended_is_served_on_and_again_when_its_engine_dies(world):
    async with world.pool() as pool:
        serving = await world.serve(pool, "a", 3)
        serving.release()
        world.started[0][2].end.set()
        await world.until_started(2)
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 3), ("a", 3)]


async def test_a_policy_that_another_service_runs_is_left_to_it_and_never_registered_again(world):
    async with world.pool() as pool:
        await world.serve(pool, "a", 3)
        await world.serve(pool, "b")
        pool.hand_over("a")
        world.proxy.backends["backends/engine-a"] = "http://another:9000/v1"
        world.started[0][2].end.set()
        await world.serve(pool, "c")  # takes its slot
        assert world.proxy.backends["backends/engine-a"] == "http://another:9000/v1"
        assert "routes/a" in world.proxy.routes
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 3), ("b", 1), ("c", 1)]


async def test_a_policy_that_another_service_has_run_since_is_not_served_again_at_a_start(world):
    async with world.pool() as pool:
        for policy in ("a", "b"):
            (await world.serve(pool, policy)).release()
    world.elsewhere = {"a"}
    async with world.pool():
        await world.until_started(3)
    assert [policy for policy, _, _ in world.started] == ["a", "b", "b"]


@pytest.mark.parametrize("failure", ["start", "registration"])
async def test_an_engine_that_cannot_be_brought_back_is_tried_again_and_no_other_is_touched(world, failure, capsys):
    async with world.pool() as pool:
        await world.serve(pool, "a", 3)
        second = await world.serve(pool, "b")
        match failure:
            case "start":
                world.failures = [OSError("no such program")]
            case "registration":
                world.proxy.refusals = 1
        world.proxy.backends.clear()
        world.started[0][2].end.set()
        await world.until_registered("backends/engine-a")
        await second.swap(world.published("b", 2))
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 3), ("b", 1), ("a", 3)]
        assert [engine.end.is_set() for _, _, engine in world.started] == [True, False, False]
    logged = capsys.readouterr().out
    assert "engine_supervisor_failed" in logged
    assert "error_id" in logged


async def test_a_policy_that_cannot_be_served_again_keeps_no_other_from_it(world):
    async with world.pool() as pool:
        for policy in ("a", "b"):
            (await world.serve(pool, policy)).release()
    world.failures = [OSError("no such program")]
    async with world.pool() as pool:
        await world.until_started(3)
        world.started[2][2].end.set()
        await world.until_started(4)
        assert world.started[2][0] == world.started[3][0]


async def test_what_was_served_comes_back_with_the_service_and_a_run_finds_it_there(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", 1)).release()
        gone = await world.serve(pool, "b", 1)
        await gone.swap(world.published("b", 2))
    (world.folder / "b-2").rmdir()
    world.proxy.routes.clear()
    async with world.pool() as pool:
        await world.until_started(3)
        await world.serve(pool, "a", 1)
        assert [(policy, version) for policy, version, _ in world.started[2:]] == [("a", 1)]
        assert world.proxy.routes == {"routes/a": 1}
        assert world.started[2][2].swaps == []
        await world.serve(pool, "a", 2)
        assert [(policy, version) for policy, version, _ in world.started[2:]] == [("a", 1)]
        assert world.started[2][2].swaps == [2]
        assert world.proxy.routes == {"routes/a": 2}


async def test_a_version_is_named_when_an_engine_that_is_kept_has_it_and_not_before(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", 1)).release()
        await world.serve(pool, "a", 2)
        # The proxy may have lost its routes meanwhile.
        world.proxy.routes.clear()
        await world.serve(pool, "a", 3)
        [(_, _, engine)] = world.started
        assert engine.routed == [({"routes/a": 1}, {"routes/a": 2}), ({}, {"routes/a": 3})]


async def test_an_external_engine_is_promoted_before_it_resumes_with_reloaded_weights(world):
    engine = ExternalEngine(kind="external", base_url="http://127.0.0.1:1/v1")
    async with world.pool() as pool:
        serving = await world.serve(pool, "a", 1, engine)
        world.started[0][2].failures.append(EngineFailed("It refuses."))
        await serving.swap(world.published("a", 2))
        assert [made.routed for _, _, made in world.started] == [[({}, {})], [({}, {"routes/a": 2})]]
        assert world.proxy.routes == {"routes/a": 2}


async def test_a_run_cancelled_while_an_engine_is_evicted_leaves_no_engine_unsupervised(world):
    async with world.pool(max_engines=1) as pool:
        (await world.serve(pool, "a", 1)).release()
        world.proxy.answers.clear()
        waiting = asyncio.create_task(world.serve(pool, "b", 1))
        await asyncio.wait_for(world.proxy.asked.wait(), WAIT_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        world.proxy.answers.set()
        assert world.started[0][2].end.is_set()
        await world.serve(pool, "a", 2)
        world.started[1][2].end.set()
        await world.until_started(3)
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 1), ("a", 2), ("a", 2)]


def test_ids_of_backends_are_short_and_different():
    names = {backend_id("engine", "p" * 62 + end) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) <= MAX_BACKEND_ID for name in names)
