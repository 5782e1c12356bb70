"""A process that calls one vendor through LiteLLM, in LiteLLM's own environment: started, watched, and started again.

Invariant: its environment and its arguments contain no key. The key of a backend is sent with each call, over a Unix socket in a
folder of the proxy's user alone, and only if the backend's address is one of the key's hosts (`backends.access`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from fulmen_llm_proxy.routing.table import Backend
from fulmen_service_kit import launch
from fulmen_service_kit.heartbeat import Pulse, ended

__all__ = ["Gateway", "GatewayDown", "GatewaySettings", "Vendor"]

START_LIMIT_S: Final = 120.0
"""It imports LiteLLM, which takes seconds; more on a busy machine."""
GRACE_S: Final = 8.0
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
WAITED_PAUSE_S: Final = 2.0
"""Calls wait for a process that starts again after at most this pause; after a longer one they fail, and go elsewhere."""
STABLE_S: Final = 60.0
WORKER: Final = Path(__file__).with_name("worker") / "__main__.py"
NOT_INSTALLED: Final = "litellm_not_installed"
REMEDY: Final = (
    "run tools/litellm_env.sh, and name its Python in FULMEN_LLM_PROXY_LITELLM_PYTHON (docs/backends.md, Other vendors)"
)
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Nothing is fetched, looked up or reported.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "AWS_EC2_METADATA_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
}
_PASSED: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")

_log = structlog.get_logger(__name__)


class GatewayDown(Exception):
    """A process takes no calls.

    Attributes:
        kind: short name, for metrics and `BackendHealth.last_failure_kind`.
        text: what its backend lacks, for callers.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """Whom a process calls; see `Backend`."""

    provider: str
    base_url: str
    region: str

    @classmethod
    def of(cls, backend: Backend) -> Vendor:
        """Returns the vendor of a backend."""
        return cls(provider=backend.provider, base_url=backend.base_url, region=backend.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What all processes share.

    Attributes:
        python: interpreter of the environment that has LiteLLM.
        folder: for sockets, inaccessible to other users.
        read_timeout_s: timeout of a vendor's answer, and between two pieces of it, seconds.
    """

    python: str
    folder: Path
    connect_timeout_s: float
    read_timeout_s: float
    max_request_bytes: int
    max_answer_bytes: int


class Gateway:
    """The process of one vendor."""

    def __init__(self, settings: GatewaySettings, vendor: Vendor, number: int) -> None:
        """Notes whom to call, and a number that no other has."""
        self._settings = settings
        self._vendor = vendor
        self._socket = settings.folder / f"{number}.socket"
        self._secret = ""
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._down: GatewayDown | None = None
        self._settled = asyncio.Event()
        """Set while it is known whether it takes calls."""

    @property
    def problem(self) -> str:
        """The kind of what keeps it from taking calls; empty if it takes them, or is about to."""
        return "" if self._down is None else self._down.kind

    async def session(self) -> aiohttp.ClientSession:
        """Returns the connections to it; waits while it starts. The caller sets the deadline.

        Raises:
            GatewayDown: if it takes no calls.
        """
        await self._settled.wait()
        if self._session is None or self._down is not None:
            raise self._down or GatewayDown("litellm_ended", "is called by a process that has just ended")
        return self._session

    def headers(self, backend: Backend, key: str) -> dict[str, str]:
        """Returns the headers of a call: the secret of this start, the vendor's key, and the backend's settings for its
        calls."""
        options = json.dumps({"drop_params": backend.drop_params, "headers": dict(backend.headers)})
        return {
            "X-Fulmen-Gateway": self._secret,
            "X-Fulmen-Key": base64.b64encode(key.encode()).decode(),
            "X-Fulmen-Options": base64.b64encode(options.encode()).decode(),
        }

    async def run(self) -> None:
        """Keeps the process running until cancelled."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                begun = time.monotonic()
                try:
                    process, pulse = await self._start()
                except GatewayDown as down:
                    self._settle(down)
                    _log.error("litellm_not_started", provider=self._vendor.provider, kind=down.kind, reason=str(down))
                else:
                    status = await ended(process.wait, process.send_signal, pulse)
                    _log.error("litellm_ended", provider=self._vendor.provider, status=status, restart_in_s=pause_s)
                    if time.monotonic() - begun > STABLE_S:
                        pause_s = FIRST_PAUSE_S
                    if pause_s <= WAITED_PAUSE_S:
                        self._settled.clear()
                    else:
                        self._settle(GatewayDown("litellm_ended", "is called by a process that keeps ending"))
                    await self._close()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._settle(GatewayDown("litellm_ended", "is no longer called"))
            await self._close()

    def _settle(self, down: GatewayDown | None) -> None:
        self._down = down
        self._settled.set()

    async def _start(self) -> tuple[asyncio.subprocess.Process, Pulse]:
        """Starts the process, and waits until it serves.

        Raises:
            GatewayDown: if it does not.
        """
        self._secret = secrets.token_urlsafe(32)
        self._socket.unlink(missing_ok=True)
        if not os.access(self._settings.python, os.X_OK):
            raise GatewayDown(NOT_INSTALLED, f"needs LiteLLM, whose environment is missing: {REMEDY}")
        try:
            pulse = Pulse()
        except OSError as error:
            raise _not_made(error) from error
        try:
            self._process = process = await self._spawned(pulse)
            pulse.started(process.pid)
            said = await self._said(process)
            if not said.get("serves"):
                raise _refused(said)
        except OSError as error:
            pulse.close()
            raise _not_made(error) from error
        except BaseException:
            pulse.close()
            await self._close()
            raise
        self._session = self._connections()
        self._settle(None)
        _log.info("litellm_started", provider=self._vendor.provider, pid=process.pid)
        return process, pulse

    async def _spawned(self, pulse: Pulse) -> asyncio.subprocess.Process:
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        home = str(self._settings.folder)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid())),
            *(self._settings.python, "-I", str(WORKER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**_ENVIRONMENT, **passed, "HOME": home, **pulse.environment},
            cwd=home,
            pass_fds=pulse.descriptors,
            start_new_session=True,
        )

    async def _said(self, process: asyncio.subprocess.Process) -> Mapping[str, object]:
        """Sends the process its configuration; returns its answer, which is empty if it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        settings = self._settings
        config = {
            "vendor": asdict(self._vendor),
            "secret": self._secret,
            "socket": str(self._socket),
            "max_request_bytes": 2 * settings.max_request_bytes,  # translated ones are a little larger
            "limits": {
                "connect_timeout_s": settings.connect_timeout_s,
                "read_timeout_s": settings.read_timeout_s,
                "max_answer_bytes": settings.max_answer_bytes,
            },
        }
        with contextlib.suppress(TimeoutError, ConnectionError, ValueError):
            async with asyncio.timeout(START_LIMIT_S):
                process.stdin.write(json.dumps(config).encode() + b"\n")
                await process.stdin.drain()
                return dict(json.loads(await process.stdout.readline()))
        return {}

    def _connections(self) -> aiohttp.ClientSession:
        settings = self._settings
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self._socket), limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
            ),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
        )

    async def _close(self) -> None:
        """Ends the process, which finishes its calls if it can, and the connections to it."""
        process, self._process = self._process, None
        session, self._session = self._session, None
        try:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                try:
                    async with asyncio.timeout(GRACE_S):
                        await process.wait()
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    with contextlib.suppress(TimeoutError):  # then the kernel holds it
                        async with asyncio.timeout(launch.KILL_LIMIT_S):
                            await process.wait()
        finally:  # also if the wait is cancelled
            if session is not None:
                await session.close()


def _not_made(error: OSError) -> GatewayDown:
    return GatewayDown("litellm_failed", f"needs a process, which cannot be started ({type(error).__name__})")


def _refused(said: Mapping[str, object]) -> GatewayDown:
    """Returns why a process does not serve, from what it said."""
    text = str(said.get("text", ""))
    if said.get("kind") == NOT_INSTALLED:
        _log.error("litellm_not_installed", reason=text)
        return GatewayDown(NOT_INSTALLED, f"needs LiteLLM, which is missing in its environment: {REMEDY}")
    if said:
        return GatewayDown(str(said.get("kind", "litellm_failed")), f"cannot be called: {text}")
    return GatewayDown("litellm_failed", "needs a process with LiteLLM, which ended or did not serve in time")
