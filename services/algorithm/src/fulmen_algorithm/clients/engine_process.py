"""The engine as a child process: started, asked, told to swap, ended.

Invariant: the child never outlives this process, since its standard input ends with it; it never sees this service's
settings, which hold the signing key.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any, Protocol

import aiohttp

from fulmen_algorithm.clients.child import Child

TOKEN_VARIABLE = "FULMEN_ENGINE_TOKEN"  # noqa: S105  (a name, not a secret)
HIDDEN_PREFIX = "FULMEN_"
START_DEADLINE_S = 120.0
SWAP_DEADLINE_S = 300.0
HEALTH_DEADLINE_S = 10.0
STOP_GRACE_S = 10.0


class EngineFailed(Exception):
    """The engine did not start, ended, refused weights or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How engines are started.

    Attributes:
        host: Address that the engine binds to.
        advertise_host: Host under which the proxy reaches it.
        port: Port; 0 takes a free one at each start.
        token: Bearer token that the engine asks for; empty for none, which needs a loopback host.
        torch_threads: Threads of one torch operation.
        device: `cpu` or `cuda`.
        max_batch_size: Requests that are generated together.
    """

    host: str
    advertise_host: str
    port: int
    token: str
    torch_threads: int
    device: str
    max_batch_size: int


class EngineRunner(Protocol):
    """What an engine runs in: a child process, or this one."""

    @property
    def pid(self) -> int:
        """Process id."""

    async def wait(self) -> int:
        """Waits for its end; returns its exit status, negative for a signal."""

    async def end(self, *, grace_s: float) -> None:
        """Ends it."""


class EngineProcess:
    """One running engine."""

    def __init__(self, child: EngineRunner, port: int, options: EngineOptions) -> None:
        self._child = child
        self._port = port
        self._options = options

    @classmethod
    async def start(cls, options: EngineOptions, *, model: Path, version: int, served_name: str) -> "EngineProcess":
        """Starts an engine and waits until it listens.

        Raises:
            EngineFailed: if it ends before that, or does not get there in time.
        """
        try:
            child = Child.start(
                _command(options, model, version, served_name), environment=_environment(options), output=PIPE
            )
        except OSError as error:
            raise EngineFailed("The engine's program cannot be started.") from error
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                line = await child.first_line()
            port = int(json.loads(line)["port"])
        except (TimeoutError, ValueError, KeyError) as error:
            await child.end(grace_s=0)
            raise EngineFailed("The engine did not start; its own log says why.") from error
        except asyncio.CancelledError:
            await child.end(grace_s=0)
            raise
        return cls(child, port, options)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def base_url(self) -> str:
        """Where the proxy finds its OpenAI API."""
        return f"http://{self._options.advertise_host}:{self._port}/v1"

    async def ended(self) -> int:
        """Waits for the end of the process; returns its exit status."""
        return await self._child.wait()

    async def sampled_tokens(self) -> int:
        """Returns how many tokens it has sampled since it started.

        Raises:
            EngineFailed: if it does not answer.
        """
        stats = await self._ask("GET", "/admin/stats", None, HEALTH_DEADLINE_S)
        return int(stats["tokens"])

    async def healthy(self) -> bool:
        """Tells whether the engine answers."""
        try:
            await self._ask("GET", "/health", None, HEALTH_DEADLINE_S)
        except EngineFailed:
            return False
        return True

    async def swap(self, model: Path, version: int) -> None:
        """Replaces the weights in place; answers under way go on and say which version sampled which token.

        Raises:
            EngineFailed: if the engine refuses or does not answer.
        """
        await self._ask("POST", "/admin/weights", {"path": str(model), "version": version}, SWAP_DEADLINE_S)

    async def stop(self) -> None:
        """Ends the process: asks, waits, kills."""
        await self._child.end(grace_s=STOP_GRACE_S)

    async def _ask(self, method: str, path: str, body: object, deadline_s: float) -> Mapping[str, Any]:
        url = f"http://{_connectable(self._options.host)}:{self._port}{path}"
        headers = {"Authorization": f"Bearer {self._options.token}"} if self._options.token else {}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, url, json=body) as response,
            ):
                if not response.ok:
                    raise EngineFailed(f"The engine answered {response.status} to {method} {path}.")
                answer: Mapping[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineFailed(f"The engine did not answer {method} {path}.") from error


def _command(options: EngineOptions, model: Path, version: int, served_name: str) -> list[str]:
    flags: dict[str, object] = {
        "--model": model,
        "--version": version,
        "--served-model-name": served_name,
        "--host": options.host,
        "--port": options.port,
        "--threads": options.torch_threads,
        "--device": options.device,
        "--max-batch-size": options.max_batch_size,
    }
    module = [sys.executable, "-m", "fulmen_algorithm.engine"]
    return [*module, *(str(part) for flag in flags.items() for part in flag)]


def _environment(options: EngineOptions) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN_PREFIX)}
    inherited |= {"OMP_NUM_THREADS": str(options.torch_threads), "TQDM_DISABLE": "1"}
    return inherited | ({TOKEN_VARIABLE: options.token} if options.token else {})


def _connectable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104  (an address to connect to)
