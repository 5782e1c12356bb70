"""Supervises several worker processes behind one pair of ports: starts, restarts and stops them.

Each worker is a complete proxy. The kernel distributes connections over them (SO_REUSEPORT). For requests that concern
all workers (GetBackendHealth, /metrics), a worker asks its siblings over their Unix sockets (`workers.siblings`).

Source: socket(7), SO_REUSEPORT.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import structlog

from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_service_kit import launch
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.heartbeat import Pulse, ended, heartbeat
from fulmen_service_kit.http.server import reserve
from fulmen_service_kit.lifecycle import Build, announce, run_service
from fulmen_service_kit.settings import ServiceSettings

_MODULE = "fulmen_llm_proxy"
_START_S = 60.0
"""Startup timeout of a worker, seconds."""
_POLL_S = 0.05
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 5.0
_GRACE_MARGIN_S = 10.0
"""Time beyond a worker's own grace period before it is killed, seconds."""

_log = structlog.get_logger(__name__)


async def run(settings: ServiceSettings, build: Build) -> int:
    """Runs the proxy in this process, or in several workers.

    Raises:
        StartupError: if it cannot start.
    """
    if not isinstance(settings, LlmProxySettings):
        raise TypeError("workers are run from LlmProxySettings")
    if settings.workers == 1 or settings.workers_dir:
        return await run_service(settings, build)
    with tempfile.TemporaryDirectory(prefix="fulmen-llm-proxy-") as folder:
        return await WorkerSupervisor(settings, Path(folder)).run()


class WorkerSupervisor:
    """Keeps the workers running until stopped."""

    def __init__(self, settings: LlmProxySettings, folder: Path) -> None:
        """Sets the settings of all workers, and a private folder for their sockets."""
        self._settings = settings
        self._folder = folder
        self._stop = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._pulses: dict[int, Pulse] = {}

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT; returns the exit status.

        Raises:
            StartupError: if a port cannot be bound, or a worker does not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        beat = heartbeat()
        settings = self._settings
        with (
            reserve(settings.host, settings.port) as rpc,
            reserve(settings.host, settings.http_port) as http,
            reserve(settings.host, settings.metrics_port) as metrics,
        ):
            ports = {"port": _port_of(rpc), "http_port": _port_of(http), "metrics_port": _port_of(metrics)}
            environment = self._environment(ports)
            indexes = range(settings.workers)
            try:
                await asyncio.gather(*(self._start(index, environment) for index in indexes))
                announce(settings, ports, workers=settings.workers)
                beat.start()
                async with asyncio.TaskGroup() as group:
                    keepers = [group.create_task(self._keep(index, environment)) for index in indexes]
                    await self._stop.wait()
                    for keeper in keepers:
                        keeper.cancel()
            finally:
                failed = await self._end()
        return 1 if failed else 0

    def _environment(self, ports: dict[str, int]) -> dict[str, str]:
        own = {f"FULMEN_LLM_PROXY_{name.upper()}": str(port) for name, port in ports.items()}
        secrets = self._settings.secret_variables
        return {**os.environ, **secrets, **own, "FULMEN_LLM_PROXY_WORKERS_DIR": str(self._folder)}

    async def _start(self, index: int, environment: dict[str, str]) -> None:
        """Starts a worker and waits until it serves.

        Raises:
            StartupError: if it ends before, or does not serve in time.
        """
        ready = self._folder / f"{index}.ready"
        ready.unlink(missing_ok=True)
        pulse = self._pulses[index] = Pulse()
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid())),
            *(sys.executable, "-P", "-m", _MODULE, "serve"),
            env={
                **environment,
                "FULMEN_LLM_PROXY_WORKER_INDEX": str(index),
                "FULMEN_LLM_PROXY_READY_FILE": str(ready),
                **pulse.environment,
            },
            pass_fds=pulse.descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C then reaches only the supervisor, which stops the workers
        )
        pulse.started(worker.pid)
        self._running[index] = worker
        try:
            async with asyncio.timeout(_START_S):
                while not ready.exists():
                    if worker.returncode is not None:
                        raise StartupError(f"Worker {index} ended with status {worker.returncode} before it served.")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            worker.kill()
            raise StartupError(f"Worker {index} did not serve within {_START_S:.0f} s.") from None

    async def _keep(self, index: int, environment: dict[str, str]) -> None:
        """Restarts a worker whenever it ends or hangs, with a back-off while it fails to start."""
        pause_s = _FIRST_PAUSE_S
        while True:
            worker = self._running[index]
            status = await ended(worker.wait, worker.send_signal, self._pulses[index])
            _log.error("worker_ended", worker=index, status=status, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self._start(index, environment)
            except StartupError as error:
                _log.error("worker_start_failed", worker=index, reason=str(error))
                pause_s = min(_MAX_PAUSE_S, pause_s * 2)
            else:
                _log.info("worker_restarted", worker=index, pid=self._running[index].pid)
                pause_s = _FIRST_PAUSE_S

    async def _end(self) -> bool:
        """Stops all workers concurrently; returns whether one had to be killed.

        Raises:
            TimeoutError: if a worker is still running 10 s after it was killed.
        """
        workers = [worker for worker in self._running.values() if worker.returncode is None]
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()
        try:
            async with asyncio.timeout(self._settings.drain_grace_s + _GRACE_MARGIN_S):
                statuses = await asyncio.gather(*(worker.wait() for worker in workers))
        except TimeoutError:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
            async with asyncio.timeout(launch.KILL_LIMIT_S):
                await asyncio.gather(*(worker.wait() for worker in workers))
            return True
        return any(statuses)


def _port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])
