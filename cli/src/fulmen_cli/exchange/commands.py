"""`fulmen exchange status`: shows the gradient exchange of a training run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.rpc.services import Services, Targets, connect
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exchange.events import PREFIX, ExchangeEvents, follow_events
from fulmen_cli.exchange.shards import LastRound, ServiceShards, ask_all, last_round
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import run_name
from fulmen_cli.output import console, enum_word, print_json, print_json_line
from fulmen_cli.proxy.health import IntervalOption, WatchOption

__all__ = ["picture", "register"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    exchange = new_group("Gradient exchange between the ranks of a training run.")
    app.add_typer(exchange, name="exchange")
    remote_command(exchange, "status")(status)


async def status(
    connection: Connection,
    run: Annotated[
        str,
        typer.Argument(
            help="projects/PROJECT/trainingRuns/ID, or the ID; by default the newest run that exchanges gradients."
        ),
    ] = "",
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST:PORT of an algorithm service that holds shards. May be repeated. By default the services in the run's settings."
        ),
    ] = None,
    watch: WatchOption = False,
    interval: IntervalOption = 1.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the gradient exchange of a training run: members, rounds, bytes, stragglers, metrics and decisions.

    Metrics and decisions are read from the run's events; members and rounds from the shards, if services hold any
    (`link.kind = "grpc"`). Exit status 1 if a service does not answer. docs/exchange.md explains each column.

    Examples:

        fulmen exchange status

        fulmen exchange status arithmetic-20260314-101500-x7k2-2-grpo --watch

        fulmen exchange status RUN --target site-a:7301 --target site-b:7301
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connection.open())
        found = await _run(client, run, connection)
        settings: dict[str, Any] = json.loads(found.settings_json or "{}")
        named = target or _targets(settings)
        clients = await _holders(stack, connection, client, named)
        ask = partial(ask_all, clients, found.name, are_named=bool(named))
        events = await stack.enter_async_context(follow_events(client, found))
        services = await ask()
        if not (
            settings.get("exchange") or events.any_exchange or any(each.shards or each.problem for each in services)
        ):
            raise CommandFailed(
                f"The run {found.name} exchanges no gradients by a codec: there is no `exchange` among its settings. "
                'Such as `exchange = {codec = "qsgd"}`, with `parallel = {kind = "ddp", ranks = 4}`: docs/exchange.md.',
                exit_code=Exit.NOT_FOUND,
            )
        if not watch:
            _print(settings, events, services, output)
            _fail_if_unreachable(services)
            return
        screen = console()
        drawn = output is Output.TABLE and screen.is_terminal
        with Live(console=screen, auto_refresh=False) if drawn else nullcontext() as live:
            while True:
                if live is not None:
                    live.update(picture(settings, events, services), refresh=True)
                else:
                    _print(settings, events, services, output, lines=True)
                await asyncio.sleep(interval)
                events.check()
                services = await ask()


async def _run(client: Services, given: str, connection: Connection) -> training_run_pb2.TrainingRun:
    """Returns a run by name, or the newest that exchanges gradients; running ones first."""
    if given:
        request = training_run_service_pb2.GetTrainingRunRequest(name=await run_name(given, connection, client))
        return (await client.training_runs.GetTrainingRun(request)).training_run
    listing = training_run_service_pb2.ListTrainingRunsRequest(page_size=PAGE_SIZE)
    runs = (await client.training_runs.ListTrainingRuns(listing)).training_runs
    found = [run for run in runs if json.loads(run.settings_json or "{}").get("exchange")]
    if not found:
        raise CommandFailed(
            'No training run exchanges gradients by a codec: such as `exchange = {codec = "qsgd"}` among the settings of '
            "one does it, docs/exchange.md; or name the run.",
            exit_code=Exit.NOT_FOUND,
        )
    running = training_run_pb2.TRAINING_RUN_STATE_RUNNING
    return next((run for run in found if run.state == running), found[0])


def _targets(settings: Mapping[str, Any]) -> list[str]:
    """Returns the distinct shard addresses of a run's settings."""
    link = (settings.get("exchange") or {}).get("link") or {}
    return list(dict.fromkeys((*(link.get("targets") or ()), *(link.get("spares") or ()))))


async def _holders(
    stack: AsyncExitStack, connection: Connection, client: Services, targets: Sequence[str]
) -> dict[str, Services]:
    """Returns the services to ask for shards, by default the one that has the run."""
    own = connection.targets().algorithm
    if not targets:
        return {own: client}
    found: dict[str, Services] = {}
    for target in targets:
        everywhere = Targets(store=target, algorithm=target, llm_proxy=target)
        found[target] = (
            client
            if target == own
            else await stack.enter_async_context(connect(everywhere, token=connection.bearer(), tls=connection.tls()))
        )
    return found


def _fail_if_unreachable(services: Sequence[ServiceShards]) -> None:
    if any(each.problem is not None for each in services):
        raise typer.Exit(Exit.FAILED)


def _print(
    settings: Mapping[str, Any],
    events: ExchangeEvents,
    services: Sequence[ServiceShards],
    output: Output,
    *,
    lines: bool = False,
) -> None:
    if output is Output.TABLE:
        console().print(picture(settings, events, services))
        sys.stdout.flush()
        return
    value = _as_json(settings, events, services)
    if lines:
        print_json_line(value)
    else:
        print_json(value)


def _as_json(settings: Mapping[str, Any], events: ExchangeEvents, services: Sequence[ServiceShards]) -> dict[str, Any]:
    return {
        "run": events.run.name,
        "state": enum_word(events.run, "state"),
        "step": events.step,
        "exchange": settings.get("exchange"),
        "metrics": {name: {"step": one.step, "value": one.value} for name, one in sorted(events.metrics.items())},
        "events": [
            {"time": one.time.isoformat(), "severity": one.severity, "message": one.message} for one in events.notices
        ],
        "services": [each.as_dict() for each in services],
    }


SHARD_COLUMNS: Final = ("shard", "service", "epoch", "round", "members", "received", "sent", "ratio", "sums",
                        "partial", "wait", "removed", "damaged", "residuals lost")  # fmt: skip
RANK_COLUMNS: Final = ("rank", "round", "since round", "late", "silent")
FIRST: Final = ("share", "ratio", "raw_bytes", "sent_bytes", "received_bytes", "wait_seconds", "encode_seconds",
                "transfer_seconds", "decode_seconds")  # fmt: skip
NOTICE_STYLES: Final = {"warning": "yellow", "error": "bold red"}
UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def picture(settings: Mapping[str, Any], events: ExchangeEvents, services: Sequence[ServiceShards]) -> RenderableType:
    """Renders an exchange.

    Args:
        settings: Of the run.
        events: Events of the run's stream.
        services: Answers of services about their shards.
    """
    parts: list[RenderableType] = list(_head(settings, events))
    if events.problem:
        parts.append(Text(events.problem, style="yellow"))
    parts += _unreachable(services)
    shards = [(each.target, shard) for each in services for shard in each.shards]
    if shards:
        parts += [Text(), _shard_table(shards)]
        if members := _rank_table([shard for _, shard in shards]):
            parts += [Text(), members]
    if (went := last_round(services)) is not None:
        parts += [Text(), _round_text(went)]
    if events.any_exchange:
        parts += [Text(), _metric_table(events)]
    if events.notices:
        parts.append(Text())
        parts += [
            Text(f"{each.time:%H:%M:%S}  {each.message}", style=NOTICE_STYLES.get(each.severity, ""))
            for each in events.notices
        ]
    return Group(*parts)


def _head(settings: Mapping[str, Any], events: ExchangeEvents) -> Iterator[Text]:
    run = events.run
    yield Text(f"run       {run.name}: {enum_word(run, 'state')}, step {events.step}/{run.step_count or '?'}")
    exchange = settings.get("exchange")
    if not exchange:
        yield Text("exchange  none among the run's settings")
        return
    numbers = [f"{name} {value}" for name, value in exchange.items() if isinstance(value, int | float)]
    kinds = [
        f"{name} {value['kind']}" for name, value in exchange.items() if isinstance(value, dict) and "kind" in value
    ]
    ranks = settings.get("parallel", {}).get("ranks")
    words = [exchange["codec"], *numbers, *kinds, *([f"ranks {ranks}"] if ranks else [])]
    yield Text("exchange  " + ", ".join(words))


def _unreachable(services: Sequence[ServiceShards]) -> Iterator[Text]:
    """Yields services that did not answer or have no shards although they were named, and shards that no service has."""
    for each in services:
        if each.problem is not None:
            yield Text(f"{each.target} does not answer: {each.problem}", style="bold red")
        elif each.nothing:
            yield Text(f"{each.target} holds no shard of it: {each.nothing}", style="yellow")
    shown = {shard.terms.shard for each in services for shard in each.shards}
    count = max((shard.terms.shard_count for each in services for shard in each.shards), default=0)
    if missing := [str(number) for number in range(count) if number not in shown]:
        others = f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''} of {count}"
        yield Text(f"Not shown: shards {others}; name the services that hold them with --target.", style="yellow")


def _shard_table(shards: Sequence[tuple[str, pb.ShardStatus]]) -> Table:
    table = _table(SHARD_COLUMNS)
    for target, shard in sorted(shards, key=lambda pair: pair[1].terms.shard):
        here, awaited = len(shard.members), shard.terms.world_size
        table.add_row(
            f"{shard.terms.shard} of {shard.terms.shard_count}",
            Text(target),
            str(shard.membership_epoch),
            str(shard.round),
            Text(f"{here} of {awaited}", style="" if here >= awaited else "yellow"),
            size(shard.received_bytes),
            size(shard.sent_bytes),
            f"{shard.ratio:.4g}x",
            f"{shard.sum_count:,}",
            _bad(shard.partial_sum_count, style="yellow"),
            f"{shard.wait_s:.3g} s",
            _bad(shard.removed_member_count),
            _bad(shard.bad_checksum_count),
            _bad(shard.lost_residual_count),
        )
    return table


def _rank_table(shards: Sequence[pb.ShardStatus]) -> Table | None:
    """Renders each rank over all shards: its oldest position, missed sums, longest silence."""
    members: dict[int, list[tuple[pb.ExchangeMember, pb.ShardStatus]]] = {}
    for shard in shards:
        for member in shard.members:
            members.setdefault(member.rank, []).append((member, shard))
    if not members:
        return None
    table = _table(RANK_COLUMNS)
    for rank, places in sorted(members.items()):
        behind = any(shard.round > member.round + 1 for member, shard in places)
        dying = any(member.idle_s > shard.terms.lease_s / 2 for member, shard in places)
        table.add_row(
            str(rank),
            Text(str(min(member.round for member, _ in places)), style="yellow" if behind else ""),
            str(max(member.first_round for member, _ in places)),
            _bad(sum(member.late_count for member, _ in places), style="yellow"),
            Text(f"{max(member.idle_s for member, _ in places):.1f} s", style="bold red" if dying else ""),
        )
    return table


def _round_text(went: LastRound) -> Text:
    over = f" (of {went.shard_count} shards)" if went.shard_count > 1 else ""
    late = f"; late: {', '.join(map(str, went.late_ranks))}" if went.late_ranks else ""
    return Text(
        f"round {went.number}{over}: ranks {', '.join(map(str, went.ranks))}; {went.duration_s:.3g} s; each sent "
        f"{size(went.sent_bytes)} of {size(went.raw_bytes)} and got {size(went.reply_bytes)}{late}"
    )


def _metric_table(events: ExchangeEvents) -> Table:
    table = _table(("metric", "latest", "step"))
    metrics = {name.removeprefix(PREFIX): one for name, one in events.metrics.items() if name.startswith(PREFIX)}
    if events.share is not None:
        metrics["share"] = events.share
    for name in [*(name for name in FIRST if name in metrics), *sorted(metrics.keys() - set(FIRST))]:
        table.add_row(Text(name.replace("_", " ")), amount(name, metrics[name].value), str(metrics[name].step))
    return table


def amount(name: str, value: float) -> str:
    """Formats a metric in the unit of its name's suffix."""
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("seconds"):
        return f"{value:.3g} s"
    if name.endswith("ratio"):
        return f"{value:.4g}x"
    if name.endswith("share"):
        return f"{value * 100:.3g} %"
    return f"{value:.4g}"


def size(size_bytes: float) -> str:
    """Formats a number of bytes with three digits: `1.23 MB`."""
    for unit in UNITS[:-1]:
        if abs(size_bytes) < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} {UNITS[-1]}"


def _bad(count: int, *, style: str = "bold red") -> Text:
    return Text(f"{count:,}", style=style if count else "")


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "service")
    return table
