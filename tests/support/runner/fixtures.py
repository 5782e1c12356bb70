"""Fixtures of all tests that run a runner; `store` comes from the conftest of each kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.support.runner.harness import SIGNING_KEY, RunnerProcess, bundle_of, rollouts_of, spec_of
from tests.support.runner.proxy_double import ProxyDouble
from tests.support.runner.store_double import StoreDouble
from tests.support.runner.stores import Ended, RealStore

Store = RealStore | StoreDouble
StartRunner = Callable[..., Awaitable[RunnerProcess]]
PublishAgent = Callable[..., Awaitable[str]]


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, a model proxy, and the means to publish agents and to start runners, which end with the test."""

    store: Store
    proxy: ProxyDouble
    start: StartRunner
    publish: PublishAgent

    @property
    def double(self) -> StoreDouble:
        """The in-memory store."""
        assert isinstance(self.store, StoreDouble)
        return self.store

    async def attempts(self, agent: str, tasks: list[object], **policy: Any) -> list[list[Ended]]:
        """Runs an agent on each task; returns the attempts of each rollout."""
        names = await self.store.create(rollouts_of(agent, tasks, **policy))
        ended = await self.store.ended(names)
        return [ended[name] for name in names]

    async def run(self, agent: str, task: object, **policy: Any) -> Ended:
        """Runs an agent on a task; returns the only attempt."""
        [[ended]] = await self.attempts(agent, [task], **policy)
        return ended


@pytest_asyncio.fixture
async def proxy() -> AsyncIterator[ProxyDouble]:
    """Yields a model proxy that serves."""
    proxy = ProxyDouble(signing_key=SIGNING_KEY)
    await proxy.start()
    yield proxy
    await proxy.close()


@pytest_asyncio.fixture
async def start_runner(store: Store, proxy: ProxyDouble) -> AsyncIterator[StartRunner]:
    """Starts runners of the store and the proxy; ends them with the test."""
    started: list[RunnerProcess] = []

    async def start(**settings: Any) -> RunnerProcess:
        base = {
            "store_target": store.target,
            "llm_proxy_url": proxy.url,
            "llm_proxy_targets": f"127.0.0.1:{proxy.grpc_port}",
            "log_level": "debug",
        }
        runner = RunnerProcess({**base, **settings})
        started.append(runner)
        return await runner.start()

    yield start
    for runner in started:
        await runner.close()


@pytest.fixture
def publish_agent(store: Store) -> PublishAgent:
    """Publishes an agent with its files; returns the name of the version."""

    async def publish(files: dict[str, str], **spec: Any) -> str:
        bundle = await store.publish("bundle.tests", bundle_of(files))
        return await store.publish("agent.tests", spec_of(bundle=bundle, **spec))

    return publish


@pytest.fixture
def world(store: Store, proxy: ProxyDouble, start_runner: StartRunner, publish_agent: PublishAgent) -> World:
    """Returns what most tests of a runner need."""
    return World(store=store, proxy=proxy, start=start_runner, publish=publish_agent)
