"""`fulmen run`: training runs."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Final

import typer
from rich.console import Console

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.rpc.services import Services
from fulmen.training.following import follow_run
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.names import run_name, short_name
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when
from fulmen_cli.rollout.figures import failure_of_run
from fulmen_cli.run.compare import compare
from fulmen_cli.run.progress import RunProgress
from fulmen_cli.run.reproduce import reproduce
from fulmen_cli.run.states import (
    RunArgument,
    checkpoints,
    pause,
    resume,
    rollback,
    state_of,
    stop,
)

__all__ = ["register"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    run = new_group("Training runs: list, watch, compare, pause, roll back, stop. `fulmen train` creates them.")
    app.add_typer(run, name="run")
    remote_command(run, "list")(list_runs)
    remote_command(run, "show")(show)
    remote_command(run, "watch")(watch)
    remote_command(run, "pause")(pause)
    remote_command(run, "resume")(resume)
    remote_command(run, "stop")(stop)
    remote_command(run, "checkpoints")(checkpoints)
    remote_command(run, "rollback")(rollback)
    remote_command(run, "compare")(compare)
    remote_command(run, "reproduce")(reproduce)


async def list_runs(
    connection: Connection,
    limit: Annotated[int, typer.Option(min=1, max=PAGE_SIZE, help="Maximum number of results.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists training runs, newest first.

    Example:

        fulmen run list
    """
    request = training_run_service_pb2.ListTrainingRunsRequest(page_size=limit)
    async with connection.open() as client:
        runs = list((await client.training_runs.ListTrainingRuns(request)).training_runs)
    rows = [
        (short_name(run.name), state_of(run), f"{run.step}/{run.step_count}",
         run.policy_version, when(run.create_time))
        for run in runs
    ]  # fmt: skip
    columns = ("run", "state", "step", "policy version", "created (UTC)")
    empty = "No training runs yet: `fulmen train CONFIG` creates one."
    print_rows(output, columns, rows, messages=runs, empty=empty, spare=("created (UTC)", "policy version"))


async def show(connection: Connection, run: RunArgument, output: OutputOption = Output.TABLE) -> None:
    """Shows the state, settings and metrics of a training run.

    Example:

        fulmen run show arithmetic-20260314-101500-x7k2-2-grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.GetTrainingRunRequest(name=await run_name(run, connection, client))
        found = (await client.training_runs.GetTrainingRun(request)).training_run
        failure = await failure_of_run(client, found.name) if output is Output.TABLE else ""
    if output is Output.JSON:
        print_json(as_dict(found))
        return
    facts = [
        ("run", found.name),
        ("state", state_of(found)),
        ("waits for", found.waiting_reason),
        ("run by", found.owner_address),
        ("stages", ", ".join(map(short_name, found.stages))),
        ("failure", found.failure_message),
        ("rollouts", failure),
        ("algorithm", found.algorithm),
        *((f"setting {key}", json.dumps(value)) for key, value in json.loads(found.settings_json or "{}").items()),
        ("step", f"{found.step}/{found.step_count}"),
        ("policy", found.policy_version),
        ("prompt", found.prompt_version),
        ("model", found.model_path),
        ("engines", f"{found.ready_engine_count} of {found.engine_count} ready" if found.engine_count else ""),
        *((f"input {use}", version) for use, version in sorted(found.inputs.items())),
        *((name, f"{value:g}") for name, value in sorted(found.results.items())),
    ]
    for label, value in facts:
        if value:
            console().print(f"{label:<36}{value}", markup=False, soft_wrap=True)


async def watch(connection: Connection, run: RunArgument, output: OutputOption = Output.TABLE) -> None:
    """Follows a training run to its end, and then the stages after it. Ctrl-C detaches; they continue.

    With `--output json`, prints one event per line.

    Example:

        fulmen run watch arithmetic-20260314-101500-x7k2-2-grpo
    """
    screen = console()
    as_json = output is Output.JSON
    async with connection.open() as client:
        name = await run_name(run, connection, client)
        while name:
            ended = await _watched(client, name, screen, as_json=as_json)
            if ended.state == training_run_pb2.TRAINING_RUN_STATE_FAILED:
                raise CommandFailed(f"The run {ended.name} failed: {ended.failure_message}")
            if not as_json:
                screen.print(f"{ended.name} ended: {enum_word(ended, 'state')}")
            has_succeeded = ended.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED
            following = dict(pairwise(ended.stages)) if has_succeeded else {}
            name = following.get(name, "")


async def _watched(client: Services, name: str, screen: Console, *, as_json: bool) -> training_run_pb2.TrainingRun:
    ended = training_run_pb2.TrainingRun(name=name)
    with RunProgress(screen, short_name(name), step_count=0, as_json=as_json) as shown:
        async for event in follow_run(client, name, on_interruption=shown.interrupted):
            shown.show(event)
            if event.HasField("run"):
                ended = event.run
    return ended
