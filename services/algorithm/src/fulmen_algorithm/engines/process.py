"""The embedded engine as a child process.

Invariant: the child never outlives this process, since its standard input ends with it; it never sees this service's
settings, which hold the signing key.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import structlog

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.cluster.gpus.machine import shown_to
from fulmen_algorithm.engines.engine import ENGINE_KEY_NAME, EngineAddress, EngineFailed, EngineOptions, SwapGate
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_service_kit.heartbeat import Pulse

_log = structlog.get_logger()

MODULE = "fulmen_algorithm.engines.embedded"
TOKEN_VARIABLE = "FULMEN_ENGINE_TOKEN"  # noqa: S105  (a name, not a secret)
HIDDEN_PREFIX = "FULMEN_"
START_DEADLINE_S = 120.0
SWAP_DEADLINE_S = 300.0
HEALTH_DEADLINE_S = 10.0
STOP_GRACE_S = 10.0
FULL_WANTED = (409, 422)
"""Statuses after which complete weights are sent: the delta has another base or cannot be read."""


class EngineRefused(EngineFailed):
    """The engine refused a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineRunner(Protocol):
    """Host of an engine: a child process, or this process."""

    @property
    def pid(self) -> int:
        """Process id."""

    async def wait(self) -> int:
        """Waits for its end; returns its exit status, negative for a signal."""

    async def end(self, *, grace_s: float) -> None:
        """Ends it."""


class EngineProcess:
    """One running engine."""

    def __init__(
        self, child: EngineRunner, port: int, options: EngineOptions, watch: asyncio.Task[None] | None = None
    ) -> None:
        self._child = child
        self._watch = watch
        self._port = port
        self._options = options

    @classmethod
    async def start(cls, options: EngineOptions, policy: PublishedPolicy, modules: ModuleStarter) -> "EngineProcess":
        """Starts an engine and waits until it listens.

        Raises:
            EngineFailed: if it exits before that, or times out.
        """
        flags = await engine_flags(options, policy)
        pulse = Pulse()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                environment = _environment(options)
                child = await modules.start(MODULE, flags, environment=environment, inherited=pulse.inherited)
        except OSError as error:  # a TimeoutError is one
            pulse.close()
            raise EngineFailed("The engine's program cannot be started.") from error
        watch = asyncio.create_task(_end_when_hung(child, pulse), name=f"engine-pulse-{child.pid}")
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                line = await child.first_line()
            port = int(json.loads(line)["port"])
        except (TimeoutError, ValueError, KeyError) as error:
            await child.end(grace_s=0)
            raise EngineFailed("The engine did not start; see its log.") from error
        except asyncio.CancelledError:
            await child.end(grace_s=0)
            raise
        return cls(child, port, options, watch)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def address(self) -> EngineAddress:
        """Address for the proxy."""
        return EngineAddress(
            base_url=f"http://{self._options.advertise_host}:{self._port}/v1",
            key_name=ENGINE_KEY_NAME if self._options.token else "",
        )

    async def ended(self) -> int:
        """Waits for the end of the process; returns its exit status."""
        return await self._child.wait()

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled since it started.

        Raises:
            EngineFailed: if it does not answer.
        """
        stats = await self._ask("GET", "/admin/stats", None, HEALTH_DEADLINE_S)
        return int(stats["tokens"])

    async def healthy(self) -> bool:
        """Returns whether the engine answers."""
        try:
            await self._ask("GET", "/health", None, HEALTH_DEADLINE_S)
        except EngineFailed:
            return False
        return True

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        """Replaces the weights in place; calls in flight continue and report which version sampled which token.

        Raises:
            EngineFailed: if the engine refuses or does not answer.
        """
        started = time.monotonic()
        answer = await self._load(policy)
        took_s = time.monotonic() - started
        await gate.promote()
        # An engine that does not report the length of its pause may have paused for the whole call.
        return SwapStats(
            pause_s=float(answer.get("pause_seconds", took_s)), size_bytes=int(answer.get("size_bytes", 0))
        )

    async def _load(self, policy: PublishedPolicy) -> Mapping[str, Any]:
        """Makes the engine load a version; complete weights if it lacks the base of a delta."""
        body: dict[str, object] = {"kind": policy.kind.value, "version": policy.version, "sha256": policy.sha256}
        if policy.kind is WeightsKind.LORA:
            body["adapters"] = {name: str(folder.resolve()) for name, folder in policy.adapters.items()}
        else:
            body["path"] = str(policy.path.resolve())
        try:
            return await self._ask("POST", "/admin/weights", body, SWAP_DEADLINE_S)
        except EngineRefused as refusal:
            if policy.kind is not WeightsKind.DELTA or refusal.status not in FULL_WANTED:
                raise
            _log.info("delta_refused", version=policy.version, status=refusal.status)
        whole = await whole_folder(policy)
        body |= {"kind": WeightsKind.FULL.value, "path": str(whole.resolve())}
        return await self._ask("POST", "/admin/weights", body, SWAP_DEADLINE_S)

    async def stop(self) -> None:
        """Ends the process: asks, waits, kills."""
        await self._child.end(grace_s=STOP_GRACE_S)

    async def _ask(self, method: str, path: str, body: object, deadline_s: float) -> Mapping[str, Any]:
        url = f"http://{connectable(self._options.host)}:{self._port}{path}"
        headers = {"Authorization": f"Bearer {self._options.token}"} if self._options.token else {}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, url, json=body) as response,
            ):
                if not response.ok:
                    raise EngineRefused(f"The engine answered {response.status} to {method} {path}.", response.status)
                answer: Mapping[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineFailed(f"The engine did not answer {method} {path}.") from error


async def _end_when_hung(child: EngineRunner, pulse: Pulse) -> None:
    """Ends an engine whose event loop no longer turns; returns with its end."""
    pulse.started(child.pid)
    hung = asyncio.create_task(pulse.until_hung())
    ended = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({hung, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            _log.warning("engine_hung", pid=child.pid, silent_s=round(pulse.silent_s, 1))
            await child.end(grace_s=0)
    finally:
        hung.cancel()
        ended.cancel()
        pulse.close()


async def engine_flags(options: EngineOptions, policy: PublishedPolicy) -> list[str]:
    """Returns the command line of an engine that starts with a version.

    Raises:
        EngineFailed: if its weights are missing.
    """
    model = policy.base_model if policy.kind is WeightsKind.LORA else None
    flags: dict[str, object] = {
        "--model": (model or await whole_folder(policy)).resolve(),
        "--version": policy.version,
        "--served-model-name": policy.policy,
        "--host": options.host,
        "--port": options.port,
        "--threads": options.torch_threads,
        "--device": options.device,
        "--max-batch-size": options.max_batch_size,
    }
    adapters = [f"--adapter={name}={folder.resolve()}" for name, folder in policy.adapters.items()]
    switches = ["--router-replay"] if options.router_replay else []
    return [*(str(part) for flag in flags.items() for part in flag), *adapters, *switches]


async def whole_folder(policy: PublishedPolicy) -> Path:
    """Returns a complete folder of a version.

    Raises:
        EngineFailed: if it does not exist and cannot be built.
    """
    try:
        return await policy.model_folder()
    except RunFailed as error:
        raise EngineFailed(error.message) from error


def _environment(options: EngineOptions) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN_PREFIX)}
    inherited |= {"OMP_NUM_THREADS": str(options.torch_threads), "TQDM_DISABLE": "1", **shown_to(options.gpus)}
    return inherited | ({TOKEN_VARIABLE: options.token} if options.token else {})


def connectable(host: str) -> str:
    """Returns the address to connect to of a server that binds to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104  (an address to connect to)
