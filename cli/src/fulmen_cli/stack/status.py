"""Collects the status of a running stack: its record, health checks, the queue."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.errors import FulmenError
from fulmen.rpc.services import Targets, connect
from fulmen.store.v1 import rollout_service_pb2
from fulmen_cli.local.health import is_serving
from fulmen_cli.local.ports import LOOPBACK
from fulmen_cli.local.record import ServiceRecord, ServiceState, StackRecord
from fulmen_cli.output import as_dict

__all__ = ["StackStatus", "stack_table", "status_of"]

QUEUE_TIMEOUT_S: Final = 3.0
DISTRIBUTIONS: Final = (
    "fulmen",
    "fulmen-service-kit",
    "fulmen-store",
    "fulmen-llm-proxy",
    "fulmen-algorithm",
    "fulmen-runner",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatus:
    """The status of a stack; `queue` is None if the store did not answer, with the reason in `queue_error`."""

    record: StackRecord
    health: dict[str, str]
    queue: dict[str, Any] | None
    queue_error: str
    versions: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Whether every process is running and ready."""
        # A draining runner may no longer serve.
        staying = [service for service in self.record.services if service.state is not ServiceState.DRAINING]
        return all(
            service.state is ServiceState.READY and self.health.get(service.name, "serving") == "serving"
            for service in staying
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON-ready values."""
        return dataclasses.asdict(self) | {"healthy": self.healthy}

    def print(self, screen: Console) -> None:
        """Prints the status."""
        screen.print(f"stack: {self.record.state}, supervisor {self.record.supervisor_pid}")
        screen.print(stack_table(self.record, health=self.health))
        screen.print("versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        if self.record.fleet:
            screen.print(f"runners: {self.record.fleet}")
        if self.queue is None:
            screen.print(f"queue: unknown ({self.queue_error})")
        else:
            numbers = ("queued_count", "running_count", "delayed_count", "runner_count", "open_credit_count")
            words = (f"{name.removesuffix('_count').replace('_', ' ')} {self.queue.get(name, 0)}" for name in numbers)
            reason = f" ({self.queue['pause_reason']})" if "pause_reason" in self.queue else ""
            paused = f", paused{reason}" if "pause_time" in self.queue else ""
            screen.print("queue: " + ", ".join(words) + paused, markup=False)


def status_of(record: StackRecord) -> StackStatus:
    """Collects the status of a stack; takes a few seconds at most."""
    return asyncio.run(_collect(record))


async def _collect(record: StackRecord) -> StackStatus:
    with_ports = [service for service in record.services if service.ports]
    answers = await asyncio.gather(*(is_serving(_grpc_target(service)) for service in with_ports))
    health = {
        service.name: "serving" if serves else "not serving"
        for service, serves in zip(with_ports, answers, strict=True)
    }
    queue, error = await _queue(record)
    return StackStatus(record=record, health=health, queue=queue, queue_error=error, versions=_versions())


async def _queue(record: StackRecord) -> tuple[dict[str, Any] | None, str]:
    targets = Targets(
        store=record.targets["store"], algorithm=record.targets["algorithm"], llm_proxy=record.targets["llm_proxy"]
    )
    token = Path(record.client_token_file).read_text(encoding="utf-8").strip()
    async with connect(targets, token=token) as client:
        try:
            stats = await client.rollouts.GetQueueStats(
                rollout_service_pb2.GetQueueStatsRequest(), timeout=QUEUE_TIMEOUT_S
            )
        except FulmenError as error:
            return None, error.message
    return as_dict(stats), ""


def _grpc_target(service: ServiceRecord) -> str:
    return f"{LOOPBACK}:{service.ports[service.name]}"


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


_STYLES = {
    ServiceState.WAITING: "dim",
    ServiceState.STARTING: "yellow",
    ServiceState.READY: "green",
    ServiceState.DRAINING: "yellow",
    ServiceState.RESTARTING: "yellow",
    ServiceState.STOPPED: "dim",
    ServiceState.FAILED: "bold red",
}


def stack_table(record: StackRecord, *, health: dict[str, str] | None = None) -> Table:
    """Renders the table of a stack.

    Args:
        record: the stack.
        health: what each service answered to a health check, by name; left out if None.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("service", "state", *(["health"] if health is not None else []), "ports", "pid", "restarts", ""):
        table.add_column(column)
    for service in record.services:
        cells = [Text(service.name), Text(service.state, style=_STYLES[service.state])]
        if health is not None:
            cells.append(Text(health.get(service.name, "")))
        cells += [Text(_ports(service)), Text(str(service.pid or "")), Text(str(service.restarts or ""))]
        table.add_row(*cells, Text(_reason(service), style="dim"))
    return table


def _reason(service: ServiceRecord) -> str:
    """Returns why a service failed or was last restarted, and when it is tried again."""
    if not service.retry_at:
        return f"last: {service.message}" if service.restarts and service.message else service.message
    left = datetime.datetime.fromisoformat(service.retry_at) - datetime.datetime.now(datetime.UTC)
    seconds = max(0, round(left.total_seconds()))
    return f"{service.message}; next try {f'in {seconds} s' if seconds else 'now'}"


def _ports(service: ServiceRecord) -> str:
    words = [f"{_role(name)} {port}" for name, port in service.ports.items()]
    return ", ".join(words)


def _role(port_name: str) -> str:
    for suffix, role in (("_metrics", "metrics"), ("_http", "http")):
        if port_name.endswith(suffix):
            return role
    return "grpc"
