"""Draws the state of a local stack as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from fulmen_cli.local.record import ServiceRecord, ServiceState, StackRecord

__all__ = ["stack_table"]

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
    """Makes the table of a stack.

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
        table.add_row(*cells, Text(service.message, style="dim"))
    return table


def _ports(service: ServiceRecord) -> str:
    words = [f"{_role(name)} {port}" for name, port in service.ports.items()]
    return ", ".join(words)


def _role(port_name: str) -> str:
    for suffix, role in (("_metrics", "metrics"), ("_http", "http")):
        if port_name.endswith(suffix):
            return role
    return "grpc"
