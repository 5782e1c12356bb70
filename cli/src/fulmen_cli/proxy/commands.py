"""`fulmen proxy`: where model calls go, how backends do, and changes of both while agents run."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import typer
from rich.text import Text

from fulmen.errors import Unavailable
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen_cli.command import Output, OutputOption, local_command, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import as_dict, console, print_json_line, print_rows
from fulmen_cli.proxy import backends as backend_commands
from fulmen_cli.proxy import routes as route_commands
from fulmen_cli.proxy.apply import apply
from fulmen_cli.proxy.backends import traits
from fulmen_cli.proxy.call import call
from fulmen_cli.proxy.health import backend_health, health
from fulmen_cli.proxy.prices import import_prices
from fulmen_cli.proxy.route_parts import canary, record
from fulmen_cli.proxy.routes import route_facts, target_text

__all__ = ["register", "watch"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    proxy = new_group("The LLM proxy: its routes and backends.")
    app.add_typer(proxy, name="proxy")
    remote_command(proxy, "routes")(routes)
    remote_command(proxy, "backends")(backends)
    remote_command(proxy, "health")(health)
    remote_command(proxy, "watch")(watch)
    remote_command(proxy, "promote")(route_commands.promote)
    remote_command(proxy, "call")(call)
    remote_command(proxy, "apply")(apply)
    local_command(proxy, "import-prices")(import_prices)
    route = new_group("One route: the targets of a public model name.")
    proxy.add_typer(route, name="route")
    remote_command(route, "put")(route_commands.put)
    remote_command(route, "show")(route_commands.show)
    remote_command(route, "delete")(route_commands.delete)
    remote_command(route, "rollback")(route_commands.rollback)
    remote_command(route, "split")(route_commands.split)
    remote_command(route, "canary")(canary)
    remote_command(route, "record")(record)
    backend = new_group("One backend: a model server.")
    proxy.add_typer(backend, name="backend")
    remote_command(backend, "add")(backend_commands.add)
    remote_command(backend, "drain")(backend_commands.drain)
    remote_command(backend, "resume")(backend_commands.resume)
    remote_command(backend, "hold")(backend_commands.hold)
    remote_command(backend, "release")(backend_commands.release)
    remote_command(backend, "delete")(backend_commands.delete)
    remote_command(backend, "health")(backend_health)


async def routes(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the routes: public model names and their targets.

    Example:

        fulmen proxy routes
    """
    found: list[route_pb2.Route] = []
    request = route_service_pb2.ListRoutesRequest(page_size=PAGE_SIZE)
    async with connection.open() as client:
        while True:
            page = await client.routes.ListRoutes(request)
            found += page.routes
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    rows = [
        (route.name.removeprefix("routes/"), str(route.version), "; ".join(map(target_text, route.targets)),
         "; ".join(f"{name} {value}" for name, value in route_facts(route)))
        for route in found
    ]  # fmt: skip
    print_rows(output, ("model", "version", "targets", "rules"), rows, messages=found, empty="No routes.")


async def backends(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the backends; see `fulmen proxy health` for their state.

    Example:

        fulmen proxy backends
    """
    found: list[backend_pb2.Backend] = []
    request = backend_service_pb2.ListBackendsRequest(page_size=PAGE_SIZE)
    async with connection.open() as client:
        while True:
            page = await client.backends.ListBackends(request)
            found += page.backends
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        answer = await client.backends.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest())
    health = {each.name: each for each in answer.backends}
    rows = []
    for backend in found:
        seen = health.get(backend.name)
        state = "draining" if backend.draining else "" if seen is None else "healthy" if seen.healthy else "failing"
        special = "; ".join(f"{name} {value}" for name, value in traits(backend) if name != "draining")
        numbers = ("", "", "") if seen is None else (seen.in_flight_count, seen.request_count, seen.failure_count)
        row = (backend.name.removeprefix("backends/"), backend.base_url, state, *map(str, numbers), special)
        rows.append(row)
    columns = ("backend", "base URL", "state", "in flight", "requests", "failures", "settings")
    print_rows(output, columns, rows, messages=found, empty="No backends.")


PATIENCE_S: Final = 180.0
REOPEN_WAIT_S: Final = 0.5


async def watch(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Prints the routes, then every change, until Ctrl-C.

    Example:

        fulmen proxy watch
    """
    known: dict[str, route_pb2.Route] = {}
    lost: float | None = None
    async with connection.open() as client:
        while True:
            stream = client.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest())
            try:
                # No deadline of our own: nothing may change for days, and the channel's keepalive finds a dead connection.
                async for answer in stream:
                    lost = None
                    _print(_changes(answer, known), as_json=output is Output.JSON)
            except Unavailable:
                lost = time.monotonic() if lost is None else lost
                if time.monotonic() - lost > PATIENCE_S:
                    raise CommandFailed(f"The proxy was unreachable for {PATIENCE_S:.0f} s.") from None
            finally:
                stream.cancel()
            await asyncio.sleep(REOPEN_WAIT_S)


def _changes(
    answer: route_service_pb2.WatchRoutesResponse, known: dict[str, route_pb2.Route]
) -> route_service_pb2.WatchRoutesResponse:
    """Returns what has not been known yet: a stream that is opened again begins with everything."""
    changed = [route for route in answer.routes if known.get(route.name) != route]
    removed = set(answer.removed)
    if answer.snapshot_complete:
        removed |= known.keys() - {route.name for route in answer.routes}
    for route in changed:
        known[route.name] = route
    for name in removed:
        known.pop(name, None)
    return route_service_pb2.WatchRoutesResponse(routes=changed, removed=sorted(removed))


def _print(news: route_service_pb2.WatchRoutesResponse, *, as_json: bool) -> None:
    if not (news.routes or news.removed):
        return
    if as_json:
        print_json_line(as_dict(news))
        return
    now, screen = f"{datetime.now(UTC):%H:%M:%S}", console()
    for route in news.routes:
        screen.print(Text(f"{now}  {route.name}  version {route.version}: {_words(route)}"), soft_wrap=True)
    for name in news.removed:
        screen.print(Text(f"{now}  {name}  deleted"), soft_wrap=True)
    sys.stdout.flush()


def _words(route: route_pb2.Route) -> str:
    facts: Mapping[str, str] = dict(route_facts(route))
    return "; ".join([*map(target_text, route.targets), *(f"{name}: {value}" for name, value in facts.items())])
