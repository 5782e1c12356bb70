"""A proxy before two backends: one that does what a test says, and a healthy one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.scripted_backend import Manner, ScriptedBackend

DEADLINE_S = 30
QUIET = {"health_interval_s": 300}
"""No probes beyond the first round, which finds no backend."""


@asynccontextmanager
async def a_pair(
    store: FakeStore, first: Manner, *, route: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningProxy, ScriptedBackend, Backend]]:
    """Runs a proxy with a route to a scripted backend, `odd`, and one that is well, `well`."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        odd = await stack.enter_async_context(ScriptedBackend(first))
        well = await stack.enter_async_context(Backend())
        proxy = await stack.enter_async_context(running_proxy(store.target, **(QUIET | settings)))
        await proxy.register("odd", odd.url)
        await proxy.register("well", well.url)
        await put(proxy, target("odd"), target("well"), **(route or {}))
        yield proxy, odd, well


async def put(proxy: RunningProxy, *targets: route_pb2.RouteTarget, model: str = MODEL, **fields: Any) -> None:
    route = route_pb2.Route(name=f"routes/{model}", targets=targets, **fields)
    await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))


async def stream(proxy: RunningProxy, key: str) -> tuple[int, bytes]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.content.read()
