"""Background role: keeps the engine alive with the right weights, and the proxy informed.

Invariant: what the proxy's route points to is registered after it listens; after a death the engine comes back with
the same weights and the same version, on a port that is registered anew.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from fulmen_algorithm.clients.engine_process import EngineFailed, EngineOptions, EngineProcess
from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.clients.proxy import ProxyAdmin
from fulmen_algorithm.domain.failure import RunFailed
from fulmen_algorithm.domain.ports import Notify, PublishedPolicy

_log = structlog.get_logger()

HEALTH_INTERVAL_S = 5.0
FAILED_CHECKS = 3
FIRST_RESTART_WAIT_S = 0.5
LONGEST_RESTART_WAIT_S = 10.0
START_ATTEMPTS = 3


class StartEngine(Protocol):
    """Starts an engine; raises EngineFailed."""

    async def __call__(self, options: EngineOptions, *, model: Path, version: int, served_name: str) -> EngineProcess:
        """Returns an engine that listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What is to be served."""

    model_name: str
    policy: PublishedPolicy
    overrides: Mapping[str, str]
    notify: Notify


class EngineSupervisor:
    """Serves one policy at a time."""

    def __init__(
        self,
        options: EngineOptions,
        proxy: ProxyAdmin,
        *,
        outage_limit_s: float,
        start: StartEngine = EngineProcess.start,
    ) -> None:
        self._options = options
        self._start = start
        self._proxy = proxy
        self._outage_limit_s = outage_limit_s
        self._served: _Served | None = None
        self._engine: EngineProcess | None = None
        self._changing = asyncio.Lock()
        self._started = asyncio.Event()
        self._tokens_before = 0
        self._tokens_of_engine = 0

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Makes a policy version answer under the policy's name.

        Raises:
            RunFailed: if the engine cannot be started with these weights.
        """
        async with self._changing:
            name = _model_name(policy)
            self._served = _Served(model_name=name, policy=policy, overrides=overrides, notify=notify)
            await self._stop_engine()
            await self._start_engine()
            await self._tell_proxy()

    async def swap(self, policy: PublishedPolicy) -> None:
        """Replaces the weights in place; an engine that will not take them is started anew with them.

        Raises:
            RunFailed: if it cannot be started with these weights.
        """
        async with self._changing:
            if self._served is None:
                raise RunFailed("No policy is served.")
            self._served = replace(self._served, policy=policy)
            try:
                if self._engine is None:
                    raise EngineFailed("The engine is being restarted.")
                await self._engine.swap(policy.path, policy.version)
            except EngineFailed as error:
                self._served.notify("warning", f"{error} It is started anew with version {policy.version}.")
                await self._stop_engine()
                await self._start_engine()
                await self._tell_proxy()
                return
            await self._patience().call(lambda: self._proxy.promote(_model_name(policy), policy.version))

    async def sampled_tokens(self) -> int:
        """Returns how many tokens were sampled so far, by this engine and those before it."""
        engine = self._engine
        if engine is not None:
            try:
                self._tokens_of_engine = await engine.sampled_tokens()
            except EngineFailed:
                _log.info("engine_stats_missing", pid=engine.pid)
        return self._tokens_before + self._tokens_of_engine

    async def run(self) -> None:
        """Watches the engine until cancelled, then stops it."""
        try:
            while True:
                await self._started.wait()
                await self._watch()
        finally:
            await self._stop_engine()

    async def _watch(self) -> None:
        """Waits until the present engine is dead or deaf, and replaces it."""
        engine = self._engine
        failed = 0
        while engine is not None and engine is self._engine:
            try:
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    status = await engine.ended()
                _log.warning("engine_ended", status=status, pid=engine.pid)
                break
            except TimeoutError:
                failed = 0 if await engine.healthy() else failed + 1
                if failed >= FAILED_CHECKS:
                    _log.warning("engine_deaf", pid=engine.pid)
                    break
        await self._replace(engine)

    async def _replace(self, dead: EngineProcess | None) -> None:
        wait_s = FIRST_RESTART_WAIT_S
        while True:
            async with self._changing:
                if self._engine is not dead or self._served is None:
                    return  # somebody else has replaced it
                self._served.notify("warning", "The engine ended; it is started anew with the same weights.")
                await self._stop_engine()
                try:
                    await self._start_engine()
                    await self._tell_proxy()
                    return
                except RunFailed:
                    dead = None
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_RESTART_WAIT_S)

    async def _start_engine(self) -> None:
        assert self._served is not None
        policy = self._served.policy
        for attempt in range(START_ATTEMPTS):
            try:
                self._engine = await self._start(
                    self._options, model=policy.path, version=policy.version, served_name=self._served.model_name
                )
                break
            except EngineFailed as error:
                _log.warning("engine_start_failed", attempt=attempt + 1, model=str(policy.path), reason=str(error))
                if attempt + 1 == START_ATTEMPTS:
                    raise RunFailed(str(error)) from error
        self._started.set()
        _log.info("engine_started", pid=self._engine.pid if self._engine else 0, version=policy.version)

    async def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        self._tokens_before += self._tokens_of_engine
        self._tokens_of_engine = 0
        self._started.clear()
        if engine is not None:
            await engine.stop()

    async def _tell_proxy(self) -> None:
        assert self._served is not None
        assert self._engine is not None
        served, base_url = self._served, self._engine.base_url
        patience = self._patience()
        await patience.call(lambda: self._proxy.register(base_url))
        await patience.call(lambda: self._proxy.put_route(served.model_name, served.policy.version, served.overrides))

    def _patience(self) -> Patience:
        assert self._served is not None
        return Patience(service="LLM proxy", notify=self._served.notify, limit_s=self._outage_limit_s)


def _model_name(policy: PublishedPolicy) -> str:
    """Takes the policy's name out of `resources/policy.<name>/versions/<n>`."""
    return policy.name.removeprefix("resources/policy.").rpartition("/versions/")[0]
