"""Engines without a model, and a proxy that only remembers, for tests of what supervises engines."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio

from fulmen.errors import FulmenError, RouteNotFound
from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceServicer, add_BackendServiceServicer_to_server
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceServicer, add_RouteServiceServicer_to_server
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.rpc.status import STATUS_METADATA_KEY, encode
from fulmen_algorithm.engines.engine import EngineAddress, EngineOptions, SwapGate
from fulmen_algorithm.engines.pool import EnginePool, RunServing
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, EngineSettings, ExternalEngine
from fulmen_algorithm.policy.served import ServedPolicies
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats

FIRST_PORT = 9000
EMBEDDED = EmbeddedEngine()
WAIT_S = 30


class Proxy(BackendServiceServicer, RouteServiceServicer):
    def __init__(self) -> None:
        self.backends: dict[str, str] = {}
        self.routes: dict[str, int] = {}
        """Version of the first target, by route."""
        self.targets: dict[str, dict[str, int]] = {}
        """Version by backend, of each route."""
        self.held: set[str] = set()
        self.stale: dict[str, int] = {}
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
            self.held.discard(request.backend.name)
            self.stale.pop(request.backend.name, None)
            self.news.notify_all()
        return backend_service_pb2.RegisterBackendResponse(backend=request.backend)

    async def HoldBackend(self, request, context):
        async with self.news:
            self.held.add(request.name)
            self.news.notify_all()
        return backend_service_pb2.HoldBackendResponse()

    async def DeleteBackend(self, request, context):
        self.backends.pop(request.name, None)
        return backend_service_pb2.DeleteBackendResponse()

    async def GetBackendHealth(self, request, context):
        found = [backend_pb2.BackendHealth(name=b, stale_version=self.stale.get(b, 0)) for b in self.backends]
        return backend_service_pb2.GetBackendHealthResponse(backends=found)

    async def GetRoute(self, request, context):
        if request.name not in self.routes:
            await refuse(RouteNotFound("There is no such route.", model=request.name), context)
        route = route_pb2.Route(name=request.name, project=self.projects[request.name])
        return route_service_pb2.GetRouteResponse(route=route)

    async def PutRoute(self, request, context):
        self.projects[request.route.name] = request.route.project
        self.routes[request.route.name] = request.route.targets[0].policy_version
        self.targets[request.route.name] = {each.backend: each.policy_version for each in request.route.targets}
        return route_service_pb2.PutRouteResponse(route=request.route)

    async def PromoteVersion(self, request, context):
        name = f"routes/{request.policy}"
        if name not in self.routes:
            await refuse(RouteNotFound("There is no such route.", policy=request.policy), context)
        self.routes[name] = request.policy_version
        self.targets[name][request.backend] = request.policy_version
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
        self.stats = SwapStats()

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
        return self.stats

    async def stop(self) -> None:
        self.end.set()


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proxy = Proxy()
        self.target = ""
        """Where the proxy listens."""
        self.started: list[tuple[str, int, LightEngine]] = []
        self.news = asyncio.Condition()
        self.failures: list[Exception] = []
        """What the next starts raise."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.notices: list[str] = []
        self.settings: list[EngineSettings] = []
        """Those of each start."""
        self.elsewhere: set[str] = set()
        """Policies that another service has run since."""

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(
            host="127.0.0.1", advertise_host="127.0.0.1", port=FIRST_PORT, token="", torch_threads=1, device="cpu",
            max_batch_size=1,
        )  # fmt: skip

    def channel(self) -> FulmenChannel:
        """Returns a channel to the proxy."""
        return open_channel(self.target)

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
        await self.may_start.wait()
        if self.failures:
            raise self.failures.pop()
        made = LightEngine(options.port, self.proxy)
        self.settings.append(engine)
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
        async with self.channel() as channel:
            pool = EnginePool(
                self.options,
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
        serving = pool.serving(run, project, engine, self.notice)
        await serving.serve(self.published(policy, version), {}, self.notice)
        return serving

    def notice(self, severity: str, text: str) -> None:
        self.notices.append(text)

    def published(self, policy: str, version: int) -> PublishedPolicy:
        path = self.folder / f"{policy}-{version}"
        path.mkdir(exist_ok=True)
        return PublishedPolicy(name=f"resources/policy.{policy}/versions/{version}", version=version, path=path)


@asynccontextmanager
async def light_world(folder: Path) -> AsyncIterator[World]:
    """Runs the proxy of a world whose models and served versions are in a folder."""
    made = World(folder)
    server = grpc.aio.server()
    add_BackendServiceServicer_to_server(made.proxy, server)
    add_RouteServiceServicer_to_server(made.proxy, server)
    made.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(None)
