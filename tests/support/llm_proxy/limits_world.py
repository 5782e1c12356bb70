"""Two proxies on one real store, with prices, and a model server behind both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fulmen.store.v1 import lease_pb2, project_service_pb2
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen.store.v1.model_limits_pb2 import ModelLimits
from tests.support.llm_proxy.backend import Backend, prompt_ids_of, reply_to, token_ids_of
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.store.running import LIMIT_S, SIGNING_KEY, Runner, StoreHandle, Stubs, create, running_store

DEFAULT = "projects/default"
HELLO = [{"role": "user", "content": "hello"}]
PROMPT_TOKENS = len(prompt_ids_of(HELLO))
COMPLETION_TOKENS = len(token_ids_of(reply_to(HELLO)))
CALL_TOKENS = PROMPT_TOKENS + COMPLETION_TOKENS
PRICES = {"byte-*": {"input": 2.0, "output": 8.0}}
CALL_MICROS = 2 * PROMPT_TOKENS + 8 * COMPLETION_TOKENS


@dataclass(kw_only=True)
class World:
    """A store, two proxies on it, a backend behind both, and an administrator."""

    store: StoreHandle
    stubs: Stubs
    proxies: tuple[RunningProxy, RunningProxy]
    backend: Backend
    runner: Runner

    async def attempt(self, *, agent: str = "", run: str = "r", **policy: Any) -> lease_pb2.Assignment:
        """Returns a running attempt of a new rollout of a run."""
        await create(self.stubs, training_run=f"projects/default/trainingRuns/{run}", agent=agent, policy=policy)
        (assignment,) = await self.runner.take(1)
        return assignment

    async def limit(self, **limits: Any) -> None:
        """Sets the limits of the project, and returns when both proxies hold them."""
        await set_limits(self.stubs, DEFAULT, **limits)
        await self.sync()

    async def sync(self) -> None:
        """Lets both proxies tell and hear everything, twice, so that each has heard what the other told."""
        for _ in range(2):
            for proxy in self.proxies:
                await proxy.parts.roles["usage-sync"].sync()  # type: ignore[attr-defined]  # the role is one

    async def usage(self, **selection: Any) -> dict[str, usage_pb.Usage]:
        """Returns what the store counted, by group."""
        answer = await self.stubs.usage.GetUsage(usage_pb.GetUsageRequest(**selection))
        return {group.name: group.usage for group in answer.groups}


@asynccontextmanager
async def limits_world(database_url: str) -> AsyncIterator[World]:
    """Runs such a world."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(database_url))
        backend = await stack.enter_async_context(Backend())
        settings: dict[str, Any] = {"signing_key": SIGNING_KEY, "prices": PRICES, "assumed_completion_tokens": 0}
        first, second = [await stack.enter_async_context(running_proxy(store.target, **settings)) for _ in range(2)]
        await first.register("one", backend.url)
        await first.put_route(target("one"))
        async with asyncio.timeout(LIMIT_S):
            while MODEL not in await _served(second):  # noqa: ASYNC110  # state of another replica
                await asyncio.sleep(0.02)
        stubs = await store.stubs()
        runner = await Runner(stubs).open()
        yield World(store=store, stubs=stubs, proxies=(first, second), backend=backend, runner=runner)


async def set_limits(stubs: Stubs, name: str, **limits: Any) -> None:
    """Replaces the limits of a project."""
    project = (await stubs.projects.GetProject(project_service_pb2.GetProjectRequest(name=name))).project
    project.model_limits.CopyFrom(ModelLimits(**limits))
    await stubs.projects.UpdateProject(project_service_pb2.UpdateProjectRequest(project=project))


async def _served(proxy: RunningProxy) -> str:
    headers = {"Authorization": f"Bearer {proxy.attempt()[1]}"}
    async with proxy.http.get(f"{proxy.url}/models", headers=headers) as answer:
        return await answer.text()
