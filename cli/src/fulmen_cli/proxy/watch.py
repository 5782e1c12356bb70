"""`fulmen proxy watch`: routes as they change; a stream that breaks is opened again."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from rich.text import Text

from fulmen.errors import Unavailable
from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import as_dict, console
from fulmen_cli.proxy.route_text import route_facts, target_text

__all__ = ["watch"]

PATIENCE_S: Final = 180.0
REOPEN_WAIT_S: Final = 0.5


async def watch(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Prints the routes, then every change, until it is interrupted.

    Example:

        fulmen proxy watch
    """
    told: dict[str, route_pb2.Route] = {}
    lost: float | None = None
    async with connection.open() as client:
        while True:
            stream = client.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest())
            try:
                # No deadline of our own: nothing may change for days, and the channel's keepalive finds a dead connection.
                async for answer in stream:
                    lost = None
                    _print(_news(answer, told), as_json=output is Output.JSON)
            except Unavailable:
                lost = time.monotonic() if lost is None else lost
                if time.monotonic() - lost > PATIENCE_S:
                    raise CommandFailed(f"The proxy could not be reached for {PATIENCE_S:.0f} s.") from None
            finally:
                stream.cancel()
            await asyncio.sleep(REOPEN_WAIT_S)


def _news(
    answer: route_service_pb2.WatchRoutesResponse, told: dict[str, route_pb2.Route]
) -> route_service_pb2.WatchRoutesResponse:
    """Returns what has not been told yet: a stream that is opened again begins with everything."""
    changed = [route for route in answer.routes if told.get(route.name) != route]
    removed = set(answer.removed)
    if answer.snapshot_complete:
        removed |= told.keys() - {route.name for route in answer.routes}
    for route in changed:
        told[route.name] = route
    for name in removed:
        told.pop(name, None)
    return route_service_pb2.WatchRoutesResponse(routes=changed, removed=sorted(removed))


def _print(news: route_service_pb2.WatchRoutesResponse, *, as_json: bool) -> None:
    if not (news.routes or news.removed):
        return
    if as_json:
        sys.stdout.write(json.dumps(as_dict(news), ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    now, screen = f"{datetime.now(UTC):%H:%M:%S}", console()
    for route in news.routes:
        screen.print(Text(f"{now}  {route.name}  version {route.version}: {_words(route)}"), soft_wrap=True)
    for name in news.removed:
        screen.print(Text(f"{now}  {name}  is gone"), soft_wrap=True)
    sys.stdout.flush()


def _words(route: route_pb2.Route) -> str:
    facts: Mapping[str, str] = dict(route_facts(route))
    return "; ".join([*map(target_text, route.targets), *(f"{name}: {value}" for name, value in facts.items())])
