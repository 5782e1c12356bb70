"""Fixtures of the runner's conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.conformance.runner.harness import SIGNING_KEY, RunnerProcess, bundle_of, spec_of
from tests.conformance.runner.proxy_double import ProxyDouble
from tests.conformance.runner.store_double import StoreDouble
from tests.conformance.runner.stores import LEASE_TTL_S, DoubleStore, RealStore, Store
from tests.support.postgres import shared_server

StartRunner = Callable[..., Awaitable[RunnerProcess]]
PublishAgent = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture(params=["double", "real"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Yields a store that serves."""
    if request.param == "double":
        double = StoreDouble(signing_key=SIGNING_KEY, lease_ttl_s=LEASE_TTL_S)
        await double.start()
        yield DoubleStore(double)
        await double.close()
        return
    server = shared_server()
    database_url = server.fresh_database()
    real = RealStore(database_url)
    await real.start()
    yield real
    await real.close()
    server.drop(database_url)


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

    async def start(**settings: object) -> RunnerProcess:
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

    async def publish(files: dict[str, str], **spec: object) -> str:
        bundle = await store.publish("bundle.tests", bundle_of(files))
        return await store.publish("agent.tests", spec_of(bundle=bundle, **spec))

    return publish
