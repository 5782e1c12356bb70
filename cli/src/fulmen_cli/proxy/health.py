"""`fulmen proxy health`: the health of backends as each proxy sees them; with --watch, refreshed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fulmen.errors import FulmenError
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2
from fulmen.rpc.services import Services, Targets, connect
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_json_line, when
from fulmen_cli.proxy.routes import backend_name

__all__ = ["backend_health", "health"]

PAGE_SIZE: Final = 1000
ASK_LIMIT_S: Final = 10.0
BAR_WIDTH: Final = 8
DEFAULT_IN_FLIGHT: Final = 1024
UNKNOWN: Final = -1
STYLES: Final = {"healthy": "green", "failing": "bold red", "open": "bold red", "draining": "yellow", "held": "yellow",
                 "half open": "yellow", "stale": "bold red"}  # fmt: skip
COLUMNS: Final = ("backend", "state", "breaker", "in flight", "waiting", "engine", "requests", "failures",
                  "last failure (UTC)")  # fmt: skip
FOLDED: Final = frozenset({"backend", "last failure (UTC)"})


WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
IntervalOption = Annotated[float, typer.Option(min=0.1, max=3600, help="Interval of --watch, seconds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Answer of one proxy; `problem` if it did not answer."""

    target: str
    backends: Sequence[backend_pb2.Backend] = ()
    health: Sequence[backend_pb2.BackendHealth] = ()
    instance_id: str = ""
    problem: FulmenError | None = None


async def health(
    connection: Connection,
    watch: WatchOption = False,
    interval: IntervalOption = 1.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the health of all backends: calls in flight and queued, circuit breakers, engine load.

    Queries every proxy of --llm-proxy-target or FULMEN_LLM_PROXY_TARGET. Exit status 1 if one does not answer.

    Examples:

        fulmen proxy health --watch

        fulmen proxy health --llm-proxy-target proxy-1:7201,proxy-2:7201
    """
    await _show(connection, "", interval if watch else None, output)


async def backend_health(
    connection: Connection,
    backend: Annotated[str, typer.Argument(help="Such as vllm-0, or backends/vllm-0.")],
    watch: WatchOption = False,
    interval: IntervalOption = 1.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the health of one backend as each proxy sees it; see `fulmen proxy health`.

    Example:

        fulmen proxy backend health vllm-0 --watch
    """
    await _show(connection, backend_name(backend), interval if watch else None, output)


async def _show(connection: Connection, name: str, interval_s: float | None, output: Output) -> None:
    async with AsyncExitStack() as stack:
        clients = {target: await _client(stack, target, connection) for target in connection.proxies()}
        seen = await _ask(clients, name)
        if name and all(each.problem is None and not each.backends for each in seen):
            raise CommandFailed(f"Backend {name} does not exist.", exit_code=Exit.NOT_FOUND)
        if interval_s is None:
            _print(seen, output)
            _fail_if_away(seen)
            return
        screen = console()
        drawn = output is Output.TABLE and screen.is_terminal
        with Live(console=screen, auto_refresh=False) if drawn else nullcontext() as live:
            while True:
                if live is not None:
                    live.update(_picture(seen), refresh=True)
                else:
                    _print(seen, output, lines=True)
                await asyncio.sleep(interval_s)
                seen = await _ask(clients, name)


async def _client(stack: AsyncExitStack, target: str, connection: Connection) -> Services:
    targets = Targets(store=target, algorithm=target, llm_proxy=target)
    return await stack.enter_async_context(connect(targets, token=connection.bearer(), tls=connection.tls()))


async def _ask(clients: dict[str, Services], name: str) -> list[Seen]:
    return list(await asyncio.gather(*(_ask_one(target, client, name) for target, client in clients.items())))


async def _ask_one(target: str, client: Services, name: str) -> Seen:
    listing = backend_service_pb2.ListBackendsRequest(page_size=PAGE_SIZE)
    try:
        listed, answer = await asyncio.gather(
            client.backends.ListBackends(listing, timeout=ASK_LIMIT_S),
            client.backends.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest(), timeout=ASK_LIMIT_S),
        )
    except FulmenError as error:
        return Seen(target=target, problem=error)
    return Seen(
        target=target,
        backends=[each for each in listed.backends if name in ("", each.name)],
        health=[each for each in answer.backends if name in ("", each.name)],
        instance_id=answer.instance_id,
    )


def _fail_if_away(seen: Sequence[Seen]) -> None:
    problems = [each.problem for each in seen if each.problem is not None]
    if len(problems) == len(seen):
        raise problems[0]
    if problems:
        raise typer.Exit(Exit.FAILED)


def _print(seen: Sequence[Seen], output: Output, *, lines: bool = False) -> None:
    if output is Output.TABLE:
        console().print(_picture(seen))
        sys.stdout.flush()
        return
    values = [_as_json(each) for each in seen]
    if lines:
        print_json_line(values)
    else:
        print_json(values)


def _as_json(seen: Seen) -> dict[str, Any]:
    if seen.problem is not None:
        return {"proxy": seen.target, "error": seen.problem.message}
    return {
        "proxy": seen.target,
        "instance_id": seen.instance_id,
        "backends": [as_dict(each) for each in seen.health],
    }


def _picture(seen: Sequence[Seen]) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{datetime.now(UTC):%H:%M:%S} UTC")] if sys.stdout.isatty() else []
    for each in seen:
        if len(seen) > 1:
            parts.append(Text(f"proxy {each.target}", style="bold"))
        if each.problem is not None:
            parts.append(Text(f"  does not answer: {each.problem.message}", style="bold red"))
        elif not each.backends:
            parts.append(Text("No backends."))
        else:
            parts.append(_table(each))
    return Group(*parts)


def _table(seen: Seen) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column not in FOLDED)
    health = {each.name: each for each in seen.health}
    for backend in seen.backends:
        one = health.get(backend.name)
        name = Text(backend.name.removeprefix("backends/"))
        if one is None:
            table.add_row(name)
            continue
        state, breaker = _state(backend, one), enum_word(one, "breaker").replace("_", " ")
        table.add_row(
            name,
            Text(state, style=STYLES.get(state, "")),
            Text(breaker, style=STYLES.get(breaker, "")),
            _in_flight(one.in_flight_count, backend.max_in_flight or DEFAULT_IN_FLIGHT),
            Text(f"{one.waiting_count:,}"),
            Text(_engine(one)),
            Text(f"{one.request_count:,}"),
            Text(f"{one.failure_count:,}"),
            Text(f"{when(one.last_failure_time)} {one.last_failure_kind}".strip()),
        )
    return table


def _state(backend: backend_pb2.Backend, health: backend_pb2.BackendHealth) -> str:
    if backend.draining:
        return "draining"
    if health.stale_version:
        return "stale"
    if backend.HasField("hold_until_time") and backend.hold_until_time.ToDatetime(UTC) > datetime.now(UTC):
        return "held"
    return "healthy" if health.healthy else "failing"


def _engine(health: backend_pb2.BackendHealth) -> str:
    """Writes the engine's own metrics, such as `3 wait, 62 %`: waiting requests, and its cache in use."""
    waits = "" if health.engine_waiting_count == UNKNOWN else f"{health.engine_waiting_count:,} wait"
    used = "" if health.engine_cache_usage == UNKNOWN else f"{health.engine_cache_usage * 100:.0f} %"
    return ", ".join(each for each in (waits, used) if each)


def _in_flight(count: int, limit: int) -> Text:
    """Writes a bar of how full the backend is, of what one proxy process may send it, and the number."""
    full = min(BAR_WIDTH, -(-count * BAR_WIDTH // limit))
    return Text.assemble(("█" * full, "cyan"), ("░" * (BAR_WIDTH - full), "bright_black"), f" {count:,}")
