"""`fulmen exchange`: how the ranks of a training run exchange gradients."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.live import Live

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.client import Client, Targets, connect
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exchange.shards import Held, ask_all
from fulmen_cli.exchange.story import Story, told_story
from fulmen_cli.exchange.table import picture
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import console, enum_word, print_json
from fulmen_cli.proxy.health import IntervalOption, WatchOption
from fulmen_cli.run.states import run_name

__all__ = ["register"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    exchange = new_group("The exchange of gradients between the ranks of a training run.")
    app.add_typer(exchange, name="exchange")
    remote_command(exchange, "status")(status)


async def status(
    connection: Connection,
    run: Annotated[
        str, typer.Argument(help="trainingRuns/ID, or the ID; by default the newest run that exchanges gradients.")
    ] = "",
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST:PORT of an algorithm service that holds shards; repeat for more. By default those that the run's "
            "settings name."
        ),
    ] = None,
    watch: WatchOption = False,
    interval: IntervalOption = 1.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows how an exchange of gradients stands: members, rounds, bytes, stragglers, figures and decisions.

    Figures and decisions are those of the run's stream; members and rounds those of the shards, where services hold any
    (`link.kind = "grpc"`). Exits with 1 if one of them does not answer. docs/exchange.md explains each column.

    Examples:

        fulmen exchange status

        fulmen exchange status arithmetic-20260314-101500-x7k2-2-grpo --watch

        fulmen exchange status RUN --target site-a:7301 --target site-b:7301
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connection.open())
        found = await _run(client, run)
        settings: dict[str, Any] = json.loads(found.settings_json or "{}")
        named = target or _targets(settings)
        clients = await _holders(stack, connection, client, named)
        ask = partial(ask_all, clients, found.name, are_named=bool(named))
        story = await stack.enter_async_context(told_story(client, found))
        held = await ask()
        if not (settings.get("exchange") or story.tells_any or any(each.shards or each.problem for each in held)):
            raise CommandFailed(
                f"The run {found.name} exchanges no gradients by a codec: there is no `exchange` among its settings. "
                'Such as `exchange = {codec = "qsgd"}`, with `parallel = {kind = "ddp", ranks = 4}`: docs/exchange.md.',
                exit_code=Exit.NOT_FOUND,
            )
        if not watch:
            _print(settings, story, held, output)
            _fail_if_away(held)
            return
        screen = console()
        drawn = output is Output.TABLE and screen.is_terminal
        with Live(console=screen, auto_refresh=False) if drawn else nullcontext() as live:
            while True:
                if live is not None:
                    live.update(picture(settings, story, held), refresh=True)
                else:
                    _print(settings, story, held, output, lines=True)
                await asyncio.sleep(interval)
                story.check()
                held = await ask()


async def _run(client: Client, given: str) -> training_run_pb2.TrainingRun:
    """Returns a run by name, or the newest that exchanges gradients, one that runs before all others."""
    if given:
        request = training_run_service_pb2.GetTrainingRunRequest(name=run_name(given))
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
    """Returns the addresses of the shards that a run's settings name, each once."""
    link = (settings.get("exchange") or {}).get("link") or {}
    return list(dict.fromkeys(link.get("targets") or ()))


async def _holders(
    stack: AsyncExitStack, connection: Connection, client: Client, targets: Sequence[str]
) -> dict[str, Client]:
    """Returns the services to ask for shards; where none is named, the one that has the run."""
    own = connection.targets().algorithm
    if not targets:
        return {own: client}
    found: dict[str, Client] = {}
    for target in targets:
        everywhere = Targets(store=target, algorithm=target, llm_proxy=target)
        found[target] = (
            client
            if target == own
            else await stack.enter_async_context(connect(everywhere, token=connection.bearer(), tls=connection.tls()))
        )
    return found


def _fail_if_away(held: Sequence[Held]) -> None:
    if any(each.problem is not None for each in held):
        raise typer.Exit(Exit.FAILED)


def _print(
    settings: Mapping[str, Any], story: Story, held: Sequence[Held], output: Output, *, lines: bool = False
) -> None:
    if output is Output.TABLE:
        console().print(picture(settings, story, held))
        sys.stdout.flush()
        return
    value = _as_json(settings, story, held)
    if lines:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    else:
        print_json(value)


def _as_json(settings: Mapping[str, Any], story: Story, held: Sequence[Held]) -> dict[str, Any]:
    return {
        "run": story.run.name,
        "state": enum_word(story.run, "state"),
        "step": story.step,
        "exchange": settings.get("exchange"),
        "figures": {name: {"step": one.step, "value": one.value} for name, one in sorted(story.figures.items())},
        "events": [
            {"time": one.time.isoformat(), "severity": one.severity, "message": one.message} for one in story.notices
        ],
        "services": [each.as_dict() for each in held],
    }
