"""`fulmen rollout`: what runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fulmen.client import Client
from fulmen.store.v1 import resource_service_pb2, rollout_pb2, rollout_service_pb2
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when, working
from fulmen_cli.rollout import dead, export
from fulmen_cli.rollout.feed import watch_groups
from fulmen_cli.rollout.pages import PAGE_SIZE, listed, rollout_name, run_name
from fulmen_cli.rollout.rescore import commands as rescore_commands
from fulmen_cli.rollout.text import attempt_text, facts_of

__all__ = ["register"]


class State(StrEnum):
    """States of a rollout that can be asked for."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Mode(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    rollout = new_group("Single executions of an agent: create, look at, cancel.")
    app.add_typer(rollout, name="rollout")
    remote_command(rollout, "create")(create)
    remote_command(rollout, "list")(list_rollouts)
    remote_command(rollout, "show")(show)
    remote_command(rollout, "watch")(watch)
    remote_command(rollout, "cancel")(cancel)
    dead.register(rollout)
    export.register(rollout)
    rescore_commands.register(rollout)


async def create(
    connection: Connection,
    agent: Annotated[str, typer.Argument(help="The agent's name, or resources/agent.NAME/versions/N.")],
    task: Annotated[str | None, typer.Option(help="The input, JSON; - reads it from standard input.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="A JSONL file: one rollout for each line.")] = None,
    mode: Annotated[Mode, typer.Option(help="What the rollouts are for.")] = Mode.TEST,
    output: OutputOption = Output.TABLE,
) -> None:
    """Adds rollouts to the queue.

    Examples:

        fulmen rollout create arithmetic --task '{"input": {"question": "2+3="}, "answer": "5"}'

        fulmen rollout create arithmetic --tasks tasks/validation.jsonl --mode validation
    """
    inputs = _inputs(task, tasks)
    async with connection.open() as client:
        version = await _agent_version(client, agent)
        wanted = [
            rollout_pb2.Rollout(
                input=each, agent=version, mode=rollout_pb2.RolloutMode.Value(f"ROLLOUT_MODE_{mode.upper()}")
            )
            for each in inputs
        ]
        created: list[rollout_pb2.Rollout] = []
        for start in range(0, len(wanted), PAGE_SIZE):
            request = rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=wanted[start : start + PAGE_SIZE])
            created += (await client.rollouts.BatchCreateRollouts(request)).rollouts
    rows = [(each.name, enum_word(each, "state")) for each in created]
    print_rows(output, ("rollout", "state"), rows, messages=created, empty="")


async def list_rollouts(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only those of this training run.")] = "",
    state: Annotated[list[State] | None, typer.Option(help="Only those in this state; repeat for more.")] = None,
    where: Annotated[
        str,
        typer.Option(
            "--filter",
            help="Only those that it selects (AIP-160): state, failure_kind, mode, priority, group_id, task_type, agent, "
            "create_time, end_time, ended_attempt_count; AND, OR (binds first), NOT.",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists rollouts, newest first.

    Examples:

        fulmen rollout list --state failed --state retry_wait

        fulmen rollout list --run arithmetic-20260314-101500-x7k2-2-grpo --limit 200

        fulmen rollout list --filter 'state = FAILED AND failure_kind != TIMEOUT AND priority >= 10'
    """
    request = rollout_service_pb2.ListRolloutsRequest(
        training_run=run_name(run),
        states=[rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{each.upper()}") for each in state or ()],
        filter=where,
    )
    async with connection.open() as client:
        rollouts = await listed(client, request, limit)
    rows = [
        (each.name, enum_word(each, "state"), enum_word(each, "failure_kind"), enum_word(each, "mode"),
         each.group_id, when(each.create_time))
        for each in rollouts
    ]  # fmt: skip
    print_rows(
        output,
        ("rollout", "state", "failure", "mode", "group", "created (UTC)"),
        rows,
        messages=rollouts,
        empty="No rollouts.",
    )


async def show(
    connection: Connection,
    rollout: Annotated[str, typer.Argument(help="rollouts/UUID, or the UUID.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows a rollout with the history of its attempts: how each ended, where and when it ran, rewards, what failed.

    Example:

        fulmen rollout show 0192f0c1-7a6e-7c53-9f3e-0123456789ab
    """
    request = rollout_service_pb2.GetRolloutRequest(name=rollout_name(rollout))
    async with connection.open() as client:
        found = (await client.rollouts.GetRollout(request)).rollout
    if output is Output.JSON:
        print_json(as_dict(found))
        return
    screen = console()
    for label, value in facts_of(found):
        if value:
            screen.print(Text(f"{label:<13}{value}"), soft_wrap=True)
    for attempt in found.attempts:
        screen.print(Text("\n" + attempt_text(attempt)), soft_wrap=True)


async def watch(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only those of this training run.")] = "",
    cursor: Annotated[str, typer.Option(help="Goes on after this point; by default from the beginning.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Prints groups of rollouts as they finish, until Ctrl-C.

    With `--output json` every group is one line, with the cursor to go on from.

    Example:

        fulmen rollout watch --run arithmetic-20260314-101500-x7k2-2-grpo
    """
    async with connection.open() as client:
        await watch_groups(client, training_run=run_name(run), cursor=cursor, as_json=output is Output.JSON)


async def cancel(
    connection: Connection,
    rollouts: Annotated[list[str] | None, typer.Argument(help="rollouts/UUID, or the UUIDs.")] = None,
    run: Annotated[str, typer.Option(help="All of this training run that have not ended.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Cancels rollouts; those that have ended stay as they are.

    Examples:

        fulmen rollout cancel 0192f0c1-7a6e-7c53-9f3e-0123456789ab

        fulmen rollout cancel --run arithmetic-20260314-101500-x7k2-2-grpo
    """
    if bool(rollouts) == bool(run):
        raise CommandFailed("Name rollouts, or a run with --run: one of them.", exit_code=Exit.USAGE)
    names = [rollout_name(each) for each in rollouts or ()]
    answer = rollout_service_pb2.CancelRolloutsResponse()
    async with connection.open() as client:
        with working("cancelling") as progress:
            for start in range(0, max(1, len(names)), PAGE_SIZE):
                request = rollout_service_pb2.CancelRolloutsRequest(
                    names=names[start : start + PAGE_SIZE], training_run=run_name(run)
                )
                part = await client.rollouts.CancelRollouts(request)
                answer.cancelled_count += part.cancelled_count
                answer.cancelling_count += part.cancelling_count
                progress(f"{answer.cancelled_count} cancelled, {answer.cancelling_count} asked to stop")
    if output is Output.JSON:
        print_json(as_dict(answer))
    else:
        console().print(f"{answer.cancelled_count} cancelled, {answer.cancelling_count} asked to stop.")


def _inputs(task: str | None, tasks: Path | None) -> list[bytes]:
    if (task is None) == (tasks is None):
        raise CommandFailed("Give the input with --task or a file with --tasks: one of them.", exit_code=Exit.USAGE)
    if tasks is not None:
        if not tasks.is_file():
            raise CommandFailed(f"There is no file {tasks}.", exit_code=Exit.USAGE)
        return [line.strip() for line in tasks.read_bytes().split(b"\n") if line.strip()]
    return [(sys.stdin.read() if task == "-" else task or "").encode()]


async def _agent_version(client: Client, agent: str) -> str:
    """Returns the version to pin: the one that was named, or the newest of the named agent."""
    name = agent if agent.startswith("resources/") else f"resources/agent.{agent}"
    if "/versions/" in name:
        return name
    answer = await client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=[name]))
    return str(answer.resources[0].name)
