"""`fulmen proxy`: where model calls go."""

from __future__ import annotations

from typing import Final

import typer

from fulmen.cli.command import Output, OutputOption, new_group, remote_command
from fulmen.cli.connection import Connection
from fulmen.cli.output import print_rows
from fulmen.llm_proxy.v1 import backend_service_pb2, route_pb2, route_service_pb2

__all__ = ["register"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    proxy = new_group("The LLM proxy: its routes and backends.")
    app.add_typer(proxy, name="proxy")
    remote_command(proxy, "routes")(routes)
    remote_command(proxy, "backends")(backends)


async def routes(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the public model names and where calls for each go.

    Example:

        fulmen proxy routes
    """
    async with connection.open() as client:
        answer = await client.routes.ListRoutes(route_service_pb2.ListRoutesRequest(page_size=PAGE_SIZE))
    found = list(answer.routes)
    rows = [
        (route.name.removeprefix("routes/"), str(route.version), "; ".join(_target(each) for each in route.targets),
         "; ".join(f"{each.mode} {each.request_fields_json}" for each in route.overrides))
        for route in found
    ]  # fmt: skip
    print_rows(output, ("model", "version", "targets", "overrides"), rows, messages=found, empty="No routes.")


async def backends(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the model servers and how they do.

    Example:

        fulmen proxy backends
    """
    async with connection.open() as client:
        listed = await client.backends.ListBackends(backend_service_pb2.ListBackendsRequest(page_size=PAGE_SIZE))
        answer = await client.backends.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest())
    health = {each.name: each for each in answer.backends}
    found = list(listed.backends)
    rows = []
    for backend in found:
        seen = health.get(backend.name)
        state = "draining" if backend.draining else "" if seen is None else "healthy" if seen.healthy else "failing"
        numbers = ("", "", "") if seen is None else (seen.in_flight_count, seen.request_count, seen.failure_count)
        rows.append((backend.name.removeprefix("backends/"), backend.base_url, state, *map(str, numbers)))
    columns = ("backend", "base URL", "state", "in flight", "requests", "failures")
    print_rows(output, columns, rows, messages=found, empty="No backends.")


def _target(target: route_pb2.RouteTarget) -> str:
    words = [target.backend.removeprefix("backends/")]
    if target.weight:
        words.append(f"weight {target.weight}")
    if target.policy:
        words.append(f"policy {target.policy} version {target.policy_version}")
    return " ".join(words)
