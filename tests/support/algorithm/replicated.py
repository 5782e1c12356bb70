"""A policy with several real engines behind a real proxy, and those who call it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.engines.engine import Engine, EngineOptions, SwapGate
from fulmen_algorithm.engines.pool import EnginePool, RunServing
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.policy.engine_settings import EngineSettings, each_engine
from fulmen_algorithm.policy.served import ServedPolicies
from fulmen_algorithm.runs.ports import EngineCount, Notify, PublishedPolicy
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy

POLICY = "tiny"
RUN = "projects/default/trainingRuns/small"
WORKERS = 8
CALLS = 24
"""Calls of a load between two events of a test."""
WAIT_S = 120
OPTIONS = EngineOptions(
    host="127.0.0.1", advertise_host="127.0.0.1", port=0, token="", torch_threads=1, device="cpu", max_batch_size=8
)


class Starter(EngineStarter):
    """Starts engines, and tells which."""

    def __init__(self, modules: ModuleStarter) -> None:
        super().__init__(modules)
        self.started: list[Engine] = []

    async def start(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        gate: SwapGate,
    ) -> Engine:
        self.started.append(await super().start(options, policy, engine=engine, notify=notify, gate=gate))
        return self.started[-1]


@dataclass(kw_only=True)
class World:
    """A policy with several engines, and those who call it.

    Attributes:
        answers: Status of each call's answer.
        attempts: The attempts of these calls.
    """

    store: FakeStore
    proxy: RunningProxy
    pool: EnginePool
    starter: Starter
    engine: EngineSettings
    models: Sequence[Path]
    modules: ModuleStarter
    notices: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)

    def version(self, number: int) -> PublishedPolicy:
        """Returns a version, whose weights are those of the model with this number."""
        name = f"resources/policy.{POLICY}/versions/{number}"
        return PublishedPolicy(name=name, version=number, path=self.models[number - 1])

    async def serve(self, number: int = 1) -> RunServing:
        serving = self.pool.serving(RUN, DEFAULT_PROJECT, self.engine, self.notice)
        await serving.serve(self.version(number), {}, self.notice)
        return serving

    def notice(self, severity: str, text: str) -> None:
        self.notices.append(text)

    async def call(self, number: int) -> None:
        """Makes a call of an attempt of its own, with a prompt of its own."""
        attempt, key = self.proxy.attempt()
        status, _ = await self.proxy.chat(key, f"{number % 90 + 10}+{number % 7}=", model=POLICY, max_tokens=12)
        self.answers.append(status)
        self.attempts.append(attempt)

    async def calls(self, count: int) -> list[str]:
        """Makes calls, some at a time; returns their attempts."""
        before = len(self.attempts)
        for first in range(0, count, WORKERS):
            await asyncio.gather(*(self.call(first + offset) for offset in range(WORKERS)))
        return self.attempts[before:]

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Calls without a pause while the block runs."""
        ending = asyncio.Event()

        async def work(number: int) -> None:
            while not ending.is_set():
                await self.call(number)
                number += WORKERS

        async with asyncio.TaskGroup() as workers:
            for number in range(WORKERS):
                workers.create_task(work(number))
            await self.more_calls()
            yield
            await self.more_calls()
            ending.set()

    async def more_calls(self) -> None:
        """Waits until the load has made some more calls."""
        wanted = len(self.answers) + CALLS
        await until(lambda: len(self.answers) >= wanted)

    async def records(self, attempts: list[str]) -> list[ModelCallRecord]:
        """Returns what was recorded of these attempts."""
        for attempt in attempts:
            await self.proxy.flush(attempt)
        return [self.store.record(attempt) for attempt in attempts]

    async def backends(self) -> dict[str, backend_pb2.Backend]:
        """Returns the proxy's backends."""
        answer = await self.proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
        return {backend.name.removeprefix("backends/"): backend for backend in answer.backends}

    @property
    def engines(self) -> EngineCount:
        """How many engines the policy has, and how many take calls."""
        return self.pool.engines_of(RUN)

    async def route(self) -> route_pb2.Route:
        answer = await self.proxy.routes.GetRoute(route_service_pb2.GetRouteRequest(name=f"routes/{POLICY}"))
        return answer.route


async def until(is_so: Callable[[], bool]) -> None:
    """Waits until something is so."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110  # other processes are watched
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replicated_world(
    models: Sequence[Path],
    engine: EngineSettings,
    folder: Path,
    modules: ModuleStarter,
    *,
    options: EngineOptions = OPTIONS,
) -> AsyncIterator[World]:
    """Runs a pool with room for the engines of one policy, in front of a proxy.

    Args:
        models: Folders of the versions, from 1.
        engine: Engines of the policy, which `World.serve` starts.
        folder: For files of the pool.
        modules: Starts their processes.
        options: How they are started.
    """
    starter = Starter(modules)
    async with FakeStore() as store, running_proxy(store.target) as proxy:
        pool = EnginePool(
            options,
            starter=starter,
            proxy=proxy.channel,
            backend_prefix="engine",
            file=ServedPolicies(folder / "served.json"),
            max_engines=len(each_engine(engine)),
            outage_limit_s=60,
            still_serves=always,
        )
        task = asyncio.create_task(pool.run())
        try:
            yield World(
                store=store, proxy=proxy, pool=pool, starter=starter, engine=engine, models=models, modules=modules
            )
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def always(policy: str) -> bool:
    return True


def versions_of(record: ModelCallRecord) -> list[int]:
    """Returns the versions that sampled the tokens of a call, in order."""
    return [part.version for part in record.policy_versions if part.end > part.start]
