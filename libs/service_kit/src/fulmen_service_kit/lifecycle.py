"""One lifecycle for every service: build, serve, drain, stop, close in reverse.

On SIGTERM or SIGINT: health says NOT_SERVING, the service drains, the server stops within the grace, roles are
cancelled, resources are closed in reverse order, exit status 0. A background role that ends or raises while the
service runs stops the process the same way with exit status 1: half a service is worse than none.
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

from fulmen_service_kit.server import RpcServer
from fulmen_service_kit.settings import ServiceSettings

# New objects before a look at the young ones; looks at the young before one at the middle-aged; and so on.
COLLECTOR_THRESHOLDS = (50_000, 20, 50)

_log = structlog.get_logger()


class Role(Protocol):
    """A background job of a service: one module, one class, one job title."""

    async def run(self) -> None:
        """Works until it is cancelled."""


async def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """What a service consists of; made by its `app.build`.

    Attributes:
        server: The bound gRPC server.
        roles: Background roles by name; they start after the server.
        drain: Called first on a stop, within the grace: tell peers, finish work.
        stop_requested: Set it to stop the service from inside, as SIGTERM would (a `Drain` rpc).
        ports: Further ports to announce, such as `http_port`.
        serve_metrics: False if the service serves /metrics on a port of its own.
    """

    server: RpcServer
    roles: Mapping[str, Role] = field(default_factory=dict)
    drain: Callable[[], Awaitable[None]] = _nothing
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    ports: Mapping[str, int] = field(default_factory=dict)
    serve_metrics: bool = True


Build = Callable[[ServiceSettings, AsyncExitStack], Awaitable[ServiceParts]]


async def run_service(settings: ServiceSettings, build: Build) -> int:
    """Runs a service until it is told to stop; returns the process's exit status.

    Args:
        settings: Its settings.
        build: Makes the parts; what must be closed goes on the stack, and is closed in reverse order.

    Raises:
        StartupError: If it cannot start.
    """
    # Imported when something is served: commands such as `migrate` measure nothing.
    from fulmen_service_kit.telemetry import Telemetry

    telemetry = Telemetry(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            parts = await build(settings, stack)
            _quieten_collector()
            return await _serve(settings, parts, stop)
    finally:
        await asyncio.to_thread(telemetry.close)


async def run_inside(settings: ServiceSettings, build: Build, stop: asyncio.Event) -> int:
    """Runs a service beside others in one process until it is told to stop; returns the status that it would exit with.

    Leaves alone what belongs to the process: signals, /metrics, exporters, the garbage collector. For debugging.

    Raises:
        StartupError: If it cannot start.
    """
    async with AsyncExitStack() as stack:
        parts = await build(settings, stack)
        return await _serve(settings, replace(parts, serve_metrics=False), stop)


def _quieten_collector() -> None:
    """Keeps the garbage collector from looking through what stays for ever, and from looking after every few objects.

    A server makes thousands of short-lived objects per batch, nearly all without cycles: with the usual limits an eighth
    of the store's time under load went into looking for some.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


async def _serve(settings: ServiceSettings, parts: ServiceParts, stop: asyncio.Event) -> int:
    ports = {"port": parts.server.port, **parts.ports}
    if parts.serve_metrics:
        from fulmen_service_kit.telemetry import serve_metrics

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
    """Returns True if a role ended, False if the service was told to stop."""
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
    """Says that the service serves: in the log, and in the ready file if there is to be one; `more` is for the log."""
    _log.info("serving", host=settings.host, pid=os.getpid(), **more, **ports)
    if settings.ready_file:
        path = Path(settings.ready_file)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({**ports, "pid": os.getpid()}))
        temporary.replace(path)
