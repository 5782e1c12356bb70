"""The lifecycle of every service: build, serve, drain, stop, close in reverse order.

On SIGTERM or SIGINT, health becomes NOT_SERVING, the service drains, the server stops within the grace period, roles are
cancelled, resources are closed in reverse order, and the exit status is 0. If a background role ends or raises, the
service stops in the same way with exit status 1, rather than run in part.
"""

import asyncio
import gc
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import structlog

from fulmen_service_kit.heartbeat import heartbeat
from fulmen_service_kit.rpc.server import RpcServer
from fulmen_service_kit.settings import ServiceSettings

# Thresholds of the three generations of the garbage collector.
COLLECTOR_THRESHOLDS = (50_000, 20, 50)

_log = structlog.get_logger()


class Role(Protocol):
    """A background role of a service."""

    async def run(self) -> None:
        """Runs until cancelled."""


async def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """The parts of a service, built by its `app.build`.

    Attributes:
        server: The bound gRPC server.
        roles: Background roles by name, started after the server.
        drain: Called first on a stop, within the grace period.
        stop_requested: Set to stop the service from inside, like SIGTERM.
        ports: Further ports to announce, such as `http_port`.
        serve_metrics: Whether the lifecycle serves /metrics.
    """

    server: RpcServer
    roles: Mapping[str, Role] = field(default_factory=dict)
    drain: Callable[[], Awaitable[None]] = _nothing
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    ports: Mapping[str, int] = field(default_factory=dict)
    serve_metrics: bool = True


Build = Callable[[ServiceSettings, AsyncExitStack], Awaitable[ServiceParts]]


async def run_service(settings: ServiceSettings, build: Build) -> int:
    """Runs a service until it is stopped; returns the exit status.

    Args:
        settings: Settings of the service.
        build: Builds the parts; resources pushed onto the stack are closed in reverse order.

    Raises:
        StartupError: If it cannot start.
    """
    # Deferred: not needed by commands such as `migrate`.
    from fulmen_service_kit.observability.loop_watchdog import LoopWatchdog
    from fulmen_service_kit.observability.telemetry import Telemetry

    heartbeat()  # so that no child of this process inherits the pipe
    telemetry = Telemetry(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            parts = await build(settings, stack)
            _quieten_collector()
            if settings.loop_probe_interval_s:
                watchdog = LoopWatchdog(loop, interval_s=settings.loop_probe_interval_s)
                watchdog.start()
                stack.callback(watchdog.stop)
            heartbeat().start()
            return await _serve(settings, parts, stop)
    finally:
        await asyncio.to_thread(telemetry.close)


async def run_inside(settings: ServiceSettings, build: Build, stop: asyncio.Event) -> int:
    """Runs a service beside others in one process until `stop` is set; returns its exit status. For debugging.

    Does not touch process-wide state: signals, /metrics, exporters, the garbage collector, the watchdog of the loop.

    Raises:
        StartupError: If it cannot start.
    """
    async with AsyncExitStack() as stack:
        parts = await build(settings, stack)
        return await _serve(settings, replace(parts, serve_metrics=False), stop)


def _quieten_collector() -> None:
    """Reduces garbage collection: freezes long-lived objects and raises the thresholds.

    A server creates thousands of short-lived objects per batch, nearly all without cycles. With the default thresholds,
    the store spent an eighth of its time under load in the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


async def _serve(settings: ServiceSettings, parts: ServiceParts, stop: asyncio.Event) -> int:
    ports = {"port": parts.server.port, **parts.ports}
    if parts.serve_metrics:
        from fulmen_service_kit.observability.telemetry import serve_metrics

        ports["metrics_port"], _ = serve_metrics(settings, parts.server.readiness)
    await parts.server.server.start()
    roles = [asyncio.create_task(role.run(), name=name) for name, role in parts.roles.items()]
    await parts.server.set_serving(True)
    roles.append(asyncio.create_task(parts.server.follow_readiness(), name="readiness"))
    announce(settings, ports)
    failed = await _wait_for_stop(stop, parts.stop_requested, roles)
    _log.info("draining", grace_s=settings.drain_grace_s)
    await parts.server.set_serving(False)
    try:
        async with asyncio.timeout(settings.drain_grace_s):
            await parts.drain()
    except TimeoutError:
        _log.warning("drain_cut_short", grace_s=settings.drain_grace_s)
    await parts.server.server.stop(grace=min(settings.drain_grace_s, 5.0))
    for task in roles:
        task.cancel()
    await asyncio.gather(*roles, return_exceptions=True)
    _log.info("stopped", failed=failed)
    return 1 if failed else 0


async def _wait_for_stop(stop: asyncio.Event, inner: asyncio.Event, roles: Sequence[asyncio.Task[None]]) -> bool:
    """Waits for a stop; returns True if a role has ended instead."""
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(inner.wait())]
    await asyncio.wait([*waits, *roles], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    dead = [task for task in roles if task.done()]
    for task in dead:
        error = task.exception() if not task.cancelled() else None
        _log.error("background_role_ended", role=task.get_name(), exc_info=error)
    return bool(dead)


def announce(settings: ServiceSettings, ports: Mapping[str, int], **more: int) -> None:
    """Announces that the service is serving, in the log and in the ready file if configured; `more` is only logged."""
    _log.info("serving", host=settings.host, pid=os.getpid(), **more, **ports)
    if settings.ready_file:
        path = Path(settings.ready_file)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps({**ports, "pid": os.getpid()}))
        temporary.replace(path)
