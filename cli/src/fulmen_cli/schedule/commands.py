"""`fulmen schedule`: creates, lists, shows, pauses, resumes and deletes schedules of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.text import Text

from fulmen import ids
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import schedule_service_pb2 as pb
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.names import short_name
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when
from fulmen_cli.project.commands import project_name
from fulmen_cli.rollout.commands import Mode, agent_version, task_inputs

__all__ = ["register"]

NameArgument = Annotated[
    str, typer.Argument(help="Id of the schedule in the token's project, or projects/PROJECT/schedules/ID.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesOptions:
    """When rollouts are created."""

    cron: Annotated[
        str,
        typer.Option(help="Minute, hour, day of the month, month and day of the week, as in cron: '0 3 * * MON-FRI'."),
    ]
    time_zone: Annotated[str, typer.Option(help="Time zone of --cron, such as Europe/Berlin; by default UTC.")] = ""
    skip_overlapping: Annotated[
        bool, typer.Option("--skip-overlapping", help="Create none while rollouts of an earlier time have not ended.")
    ] = False
    skip_missed: Annotated[bool, typer.Option("--skip-missed", help="Skip times at which the store was down.")] = False


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Schedules: rollouts that are created at the times of a cron expression.")
    remote_command(group, "create")(create)
    remote_command(group, "list")(list_schedules)
    remote_command(group, "show")(show)
    remote_command(group, "pause")(pause)
    remote_command(group, "resume")(resume)
    remote_command(group, "delete")(delete)
    app.add_typer(group, name="schedule")


async def create(
    connection: Connection,
    name: NameArgument,
    agent: Annotated[str, typer.Argument(help="The agent's name, or resources/agent.NAME/versions/N.")],
    times: TimesOptions,
    task: Annotated[str | None, typer.Option(help="The input, JSON; - reads it from standard input.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="JSONL file, one rollout per line; at most 100.")] = None,
    mode: Annotated[Mode, typer.Option(help="Mode of the rollouts.")] = Mode.TEST,
    output: OutputOption = Output.TABLE,
) -> None:
    """Creates a schedule. It pins the current latest version of an agent.

    A schedule cannot be changed: delete it and create another one. If times passed while the store was down, only the
    latest is made up for.

    Examples:

        fulmen schedule create nightly arithmetic --cron '0 3 * * *' --time-zone Europe/Berlin --tasks tasks/test.jsonl

        fulmen schedule create hourly arithmetic --cron '0 * * * *' --skip-overlapping --task '{"input": "2+3="}'
    """
    inputs = task_inputs(task, tasks)
    schedule = pb.Schedule(
        name=_full_name(name, connection),
        cron=times.cron,
        time_zone=times.time_zone,
        overlap_policy=pb.OVERLAP_POLICY_SKIP if times.skip_overlapping else pb.OVERLAP_POLICY_ALLOW,
        missed_policy=pb.MISSED_POLICY_SKIP if times.skip_missed else pb.MISSED_POLICY_LATEST,
    )
    async with connection.open() as client:
        version = await agent_version(client, agent)
        for each in inputs:
            number = rollout_pb2.RolloutMode.Value(f"ROLLOUT_MODE_{mode.upper()}")
            schedule.rollouts.add(input=each, agent=version, mode=number)
        created = (await client.schedules.CreateSchedule(pb.CreateScheduleRequest(schedule=schedule))).schedule
    _print_one(created, output, f"Created {short_name(created.name)}: {_next(created)}.")


async def list_schedules(
    connection: Connection,
    project: Annotated[str, typer.Option(help="Project of the schedules; by default the token's.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists the schedules of a project by name, with their last and next times.

    Example:

        fulmen schedule list
    """
    request = pb.ListSchedulesRequest(project=project_name(project) if project else "")
    async with connection.open() as client:
        found = (await client.schedules.ListSchedules(request)).schedules
    rows = [
        (
            short_name(each.name),
            each.cron,
            each.time_zone,
            str(each.rollout_count),
            when(each.last_run.due_time),
            enum_word(each.last_run, "state") if each.HasField("last_run") else "",
            "paused" if each.HasField("pause_time") else when(each.next_run_time),
        )
        for each in found
    ]
    columns = ("schedule", "cron", "time zone", "rollouts", "last (UTC)", "result", "next (UTC)")
    print_rows(output, columns, rows, messages=list(found), empty="No schedules.", right=("rollouts",))


async def show(connection: Connection, name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """Shows a schedule: its rollouts, its next times, and what happened at the last ones.

    Example:

        fulmen schedule show nightly
    """
    async with connection.open() as client:
        request = pb.GetScheduleRequest(name=_full_name(name, connection))
        answer = await client.schedules.GetSchedule(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
        return
    screen = console()
    for label, value in _facts(answer):
        if value:
            screen.print(Text(f"{label:<12}{value}"), soft_wrap=True)
    if not answer.runs:
        return
    screen.print()
    rows = [
        (
            when(run.due_time),
            enum_word(run, "state"),
            str(len(run.rollouts) or ""),
            short_name(run.rollouts[0]) if run.rollouts else run.failure_message,
        )
        for run in answer.runs
    ]
    columns = ("due (UTC)", "result", "rollouts", "the first, or why not")
    print_rows(output, columns, rows, messages=list(answer.runs), empty="", right=("rollouts",))


async def pause(
    connection: Connection,
    name: NameArgument,
    reason: Annotated[str, typer.Option(help="The reason, shown to people who look at it.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Pauses a schedule: times that pass are not made up for.

    Example:

        fulmen schedule pause nightly --reason "until the new model is there"
    """
    request = pb.PauseScheduleRequest(name=_full_name(name, connection), reason=reason)
    async with connection.open() as client:
        schedule = (await client.schedules.PauseSchedule(request)).schedule
    _print_one(schedule, output, f"Paused {short_name(schedule.name)}.")


async def resume(connection: Connection, name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """Resumes a schedule with its first time from now on.

    Example:

        fulmen schedule resume nightly
    """
    async with connection.open() as client:
        request = pb.ResumeScheduleRequest(name=_full_name(name, connection))
        schedule = (await client.schedules.ResumeSchedule(request)).schedule
    _print_one(schedule, output, f"Resumed {short_name(schedule.name)}: {_next(schedule)}.")


async def delete(connection: Connection, name: NameArgument) -> None:
    """Deletes a schedule. Rollouts that it has created are kept.

    Example:

        fulmen schedule delete nightly
    """
    full_name = _full_name(name, connection)
    async with connection.open() as client:
        await client.schedules.DeleteSchedule(pb.DeleteScheduleRequest(name=full_name))
    console().print(f"Deleted {short_name(full_name)}.", markup=False)


def _full_name(given: str, connection: Connection) -> str:
    return given if given.startswith("projects/") else ids.schedule_name(connection.project, given)


def _print_one(schedule: pb.Schedule, output: Output, text: str) -> None:
    if output is Output.JSON:
        print_json(as_dict(schedule))
    else:
        console().print(text, markup=False, soft_wrap=True)


def _next(schedule: pb.Schedule) -> str:
    return "paused" if schedule.HasField("pause_time") else f"next at {when(schedule.next_run_time)} UTC"


def _facts(answer: pb.GetScheduleResponse) -> Iterator[tuple[str, str]]:
    schedule = answer.schedule
    yield "schedule", schedule.name
    yield "cron", f"{schedule.cron} in {schedule.time_zone}"
    yield "rollouts", f"{schedule.rollout_count} of {_agents(schedule.rollouts)}"
    skips = schedule.overlap_policy == pb.OVERLAP_POLICY_SKIP
    yield "overlap", "skipped while an earlier run has not ended" if skips else "allowed"
    passes = schedule.missed_policy == pb.MISSED_POLICY_SKIP
    yield "missed", "skipped" if passes else "the latest missed time is made up for"
    yield "created", f"{when(schedule.create_time)} UTC"
    if schedule.HasField("pause_time"):
        reason = f": {schedule.pause_reason}" if schedule.pause_reason else ""
        yield "paused", f"{when(schedule.pause_time)} UTC{reason}"
    yield "next", _times(answer.next_run_times)


def _agents(rollouts: Sequence[rollout_pb2.Rollout]) -> str:
    return ", ".join(sorted({each.agent for each in rollouts if each.agent})) or "the runner's own agent"


def _times(times: Sequence[Timestamp]) -> str:
    return ", ".join(map(when, times)) + " UTC" if times else ""
