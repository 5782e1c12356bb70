"""Every service of a deployment, for tests that hold all of them to one rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

import fulmen_algorithm.app
import fulmen_llm_proxy.app
import fulmen_runner.app
from fulmen.ids import ALL_PROJECTS
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.algorithm.warm import given_forks_here
from tests.support.store.running import SIGNING_KEY, StoreHandle

__all__ = ["SERVICES", "serving", "target_of"]

SERVICES: Final = ("store", "llm_proxy", "algorithm", "runner")


@asynccontextmanager
async def serving(
    service: str, store: StoreHandle, folder: Path, *, roles: bool = False, trains: bool = False, **changes: Any
) -> AsyncIterator[ServiceParts]:
    """Serves a service beside a store until the block ends; the store itself is served already.

    Args:
        service: One of `SERVICES`.
        store: The store.
        folder: An empty folder for its state.
        roles: Whether its background roles run, too; one that ends fails the test.
        trains: Whether it will start engines or ranks, and forks what all tests of this process fork.
        changes: Settings that differ.
    """
    if service == "store":
        assert not changes
        yield store.parts
        return
    build, settings = _configured(service, store, folder, changes)
    async with AsyncExitStack() as stack:
        with given_forks_here() if trains else nullcontext():
            parts: ServiceParts = await build(settings, stack)
        await parts.server.server.start()
        stack.push_async_callback(parts.server.server.stop, None)
        tasks = [asyncio.create_task(role.run(), name=name) for name, role in parts.roles.items()] if roles else []
        try:
            yield parts
            for task in tasks:
                if task.done():
                    task.result()
                    raise AssertionError(f"the background role {task.get_name()} ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _configured(service: str, store: StoreHandle, folder: Path, changes: dict[str, Any]) -> tuple[Any, Any]:
    role = Role.RUNNER if service == "runner" else Role.SERVICE
    token = TokenSigner(SIGNING_KEY).issue(role, subject=service, ttl_s=600, project=ALL_PROJECTS)
    given: dict[str, Any] = {"port": 0, "metrics_port": 0, "store_target": store.target, "token": token} | changes
    if service == "llm_proxy":
        given |= {"http_port": 0, "attempt_key_secret": attempt_secrets(SIGNING_KEY)} | changes
        # Its metrics are registered once per process otherwise.
        build = partial(fulmen_llm_proxy.app.build_proxy, registry=CollectorRegistry())
        return build, LlmProxySettings(**given)
    if service == "algorithm":
        # There is no proxy. The store says at once that it is none; a port where nobody listens is tried five times.
        usual: dict[str, Any] = {"state_dir": folder / "state", "llm_proxy_target": store.target}
        return fulmen_algorithm.app.build, AlgorithmServiceSettings(**(usual | given))
    return fulmen_runner.app.build, RunnerSettings(**({"work_dir": str(folder)} | given))


def target_of(parts: ServiceParts) -> str:
    """Returns the address of a service's rpcs."""
    return f"127.0.0.1:{parts.server.port}"
