"""`fulmen rollout`: creates, lists, shows, watches and cancels rollouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from google.protobuf.duration_pb2 import Duration
from rich.text import Text

from fulmen.ids import parse_attempt_name
from fulmen.rpc.services import Services
from fulmen.store.v1 import attempt_pb2, failure_pb2, resource_service_pb2, rollout_pb2, rollout_service_pb2
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import ROLLOUT_FORMS, rollout_name, rollout_names, run_name, short_name
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when, working
from fulmen_cli.rollout import comparison, dead, export, selection, watch
from fulmen_cli.rollout.backlog import pause_text
from fulmen_cli.rollout.figures import FIGURES, cost_text, figure_cells, progress_text, reward_text, time_text
from fulmen_cli.rollout.listing import (
    PAGE_SIZE,
    FilterOption,
    StateOption,
    listed,
    numbers_of,
    print_first_failure,
)
from fulmen_cli.rollout.rescore import commands as rescore_commands

__all__ = ["Mode", "agent_version", "attempt_text", "facts_of", "register", "task_inputs"]


_WAITING: Final = (rollout_pb2.ROLLOUT_STATE_QUEUED, rollout_pb2.ROLLOUT_STATE_RETRY_WAIT)


class Mode(StrEnum):
    """The mode of a rollout."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    rollout = new_group("Rollouts: create, inspect, count, change, cancel, delete, export.")
    app.add_typer(rollout, name="rollout")
    remote_command(rollout, "create")(create)
    remote_command(rollout, "list")(list_rollouts)
    remote_command(rollout, "show")(show)
    watch.register(rollout)
    remote_command(rollout, "cancel")(cancel)
    selection.register(rollout)
    comparison.register(rollout)
    dead.register(rollout)
    export.register(rollout)
    rescore_commands.register(rollout)


async def create(
    connection: Connection,
    agent: Annotated[str, typer.Argument(help="The agent's name, or resources/agent.NAME/versions/N.")],
    task: Annotated[str | None, typer.Option(help="The input, JSON; - reads it from standard input.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="JSONL file, one rollout per line.")] = None,
    mode: Annotated[Mode, typer.Option(help="Mode of the rollouts.")] = Mode.TEST,
    output: OutputOption = Output.TABLE,
) -> None:
    """Adds rollouts to the queue.

    Examples:

        fulmen rollout create arithmetic --task '{"input": {"question": "2+3="}, "answer": "5"}'

        fulmen rollout create arithmetic --tasks tasks/validation.jsonl --mode validation
    """
    inputs = task_inputs(task, tasks)
    async with connection.open() as client:
        version = await agent_version(client, agent)
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
    rows = [(short_name(each.name), enum_word(each, "state")) for each in created]
    print_rows(output, ("rollout", "state"), rows, messages=created, empty="")


async def list_rollouts(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only rollouts of this training run.")] = "",
    state: StateOption = None,
    where: FilterOption = "",
    order_by: Annotated[
        str,
        typer.Option(
            help="Order by these fields, separated by commas, each followed by `desc` for the largest first: "
            "priority, create_time, end_time, reward, duration, prompt_token_count, completion_token_count, "
            "token_count, cost_micros. By default newest first.",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of results.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists rollouts, newest first: state, reward, duration, tokens (prompts and completions) and cost.

    Examples:

        fulmen rollout list --run latest --filter 'reward < 0.5' --order-by 'duration desc'

        fulmen rollout list --state failed --state retry_wait

        fulmen rollout list --run arithmetic-20260314-101500-x7k2-2-grpo --limit 200

        fulmen rollout list --filter 'state = FAILED AND failure_kind != TIMEOUT AND priority >= 10'
    """
    request = rollout_service_pb2.ListRolloutsRequest(
        states=numbers_of(state),
        filter=where,
        order_by=order_by,
    )
    async with connection.open() as client:
        request.training_run = await run_name(run, connection, client)
        rollouts = await listed(client, request, limit)
    rows = [
        (short_name(each.name), enum_word(each, "state"), *figure_cells(each), enum_word(each, "failure_kind"),
         enum_word(each, "mode"), each.group_id, when(each.create_time))
        for each in rollouts
    ]  # fmt: skip
    more = ("failure", "mode", "group", "created (UTC)")
    print_rows(
        output,
        ("rollout", "state", *FIGURES, *more),
        rows,
        messages=rollouts,
        empty="No rollouts.",
        right=FIGURES,
        spare=("group", "mode", "created (UTC)", "failure"),
    )
    print_first_failure(output, rollouts)


async def show(
    connection: Connection,
    rollout: Annotated[str, typer.Argument(help=f"{ROLLOUT_FORMS}.")],
    printed: Annotated[
        bool, typer.Option("--printed", help="Also show the end of what each attempt's agent printed.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows a rollout and its attempts: outcomes, runners, times, progress, rewards, failures.

    Examples:

        fulmen rollout show 0192f0c1-7a6e-7c53-9f3e-0123456789ab

        fulmen rollout show latest --printed
    """
    async with connection.open() as client:
        name = await rollout_name(rollout, connection, client)
        request = rollout_service_pb2.GetRolloutRequest(name=name, with_printed=printed)
        found = (await client.rollouts.GetRollout(request)).rollout
        paused = await _pause(client, found) if found.state in _WAITING else ""
    if output is Output.JSON:
        print_json(as_dict(found))
        return
    screen = console()
    if paused:
        screen.print(paused, style="yellow", markup=False)
    for label, value in facts_of(found):
        if value:
            screen.print(Text(f"{label:<13}{value}"), soft_wrap=True)
    for attempt in found.attempts:
        screen.print(Text("\n" + attempt_text(attempt)), soft_wrap=True)


async def _pause(client: Services, rollout: rollout_pb2.Rollout) -> str:
    """Returns what keeps a rollout waiting; empty if its queue and its agent are served."""
    stats = await client.rollouts.GetQueueStats(rollout_service_pb2.GetQueueStatsRequest(project=rollout.project))
    if stats.HasField("pause_time"):
        return f"Its queue is {pause_text(stats)}."
    if any(each.agent == rollout.agent for each in stats.paused_agents):
        return "Its agent is paused, because several runners were lost while they ran it: see `fulmen queue`."
    return ""


async def cancel(
    connection: Connection,
    rollouts: Annotated[list[str] | None, typer.Argument(help=f"Each {ROLLOUT_FORMS}.")] = None,
    run: Annotated[str, typer.Option(help="Cancel all rollouts of this training run.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Cancels rollouts; rollouts that have ended are not changed.

    Examples:

        fulmen rollout cancel 0192f0c1-7a6e-7c53-9f3e-0123456789ab

        fulmen rollout cancel --run arithmetic-20260314-101500-x7k2-2-grpo
    """
    if bool(rollouts) == bool(run):
        raise CommandFailed("Give either names of rollouts or a run with --run.", exit_code=Exit.USAGE)
    answer = rollout_service_pb2.CancelRolloutsResponse()
    async with connection.open() as client:
        names = await rollout_names(rollouts or (), connection, client)
        training_run = await run_name(run, connection, client)
        with working("cancelling") as progress:
            for start in range(0, max(1, len(names)), PAGE_SIZE):
                request = rollout_service_pb2.CancelRolloutsRequest(
                    names=names[start : start + PAGE_SIZE], training_run=training_run
                )
                part = await client.rollouts.CancelRollouts(request)
                answer.cancelled_count += part.cancelled_count
                answer.cancelling_count += part.cancelling_count
                progress(f"{answer.cancelled_count} cancelled, {answer.cancelling_count} asked to stop")
    if output is Output.JSON:
        print_json(as_dict(answer))
    else:
        console().print(f"{answer.cancelled_count} cancelled, {answer.cancelling_count} asked to stop.")


def task_inputs(task: str | None, tasks: Path | None) -> list[bytes]:
    """Returns the inputs of rollouts: one that is given or read from standard input, or the lines of a file.

    Raises:
        CommandFailed: If both or neither are given, or there is no such file.
    """
    if (task is None) == (tasks is None):
        raise CommandFailed("Give either the input with --task or a file with --tasks.", exit_code=Exit.USAGE)
    if tasks is not None:
        if not tasks.is_file():
            raise CommandFailed(f"The file {tasks} does not exist.", exit_code=Exit.USAGE)
        return [line.strip() for line in tasks.read_bytes().split(b"\n") if line.strip()]
    return [(sys.stdin.read() if task == "-" else task or "").encode()]


async def agent_version(client: Services, agent: str) -> str:
    """Returns the version to pin: the given one, or the latest of the agent."""
    name = agent if agent.startswith("resources/") else f"resources/agent.{agent}"
    if "/versions/" in name:
        return name
    answer = await client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=[name]))
    return str(answer.resources[0].name)


# Of the store, for a quantile without a factor.
DEFAULT_FACTOR: Final = 3
MAX_OUTPUT_SHOWN: Final = 2_000
RETRY_OF: Final = "fulmen.retry_of"


def facts_of(rollout: rollout_pb2.Rollout) -> Iterator[tuple[str, str]]:
    """Yields label and value of each line that describes a rollout; lines without a value are left out."""
    yield "rollout", rollout.name
    yield "state", " ".join(filter(None, (enum_word(rollout, "state"), enum_word(rollout, "failure_kind"))))
    yield "failure", rollout.failure_message
    yield "reward", reward_text(rollout.reward) if rollout.HasField("reward") else ""
    yield "duration", time_text(rollout.duration.ToNanoseconds() / 1e9) if rollout.HasField("duration") else ""
    yield "tokens", _tokens(rollout)
    yield "cost", cost_text(rollout.cost_micros) if rollout.HasField("cost_micros") else ""
    yield "mode", enum_word(rollout, "mode")
    yield "agent", rollout.agent
    yield "task type", rollout.task_type
    yield "training run", rollout.training_run
    yield "group", f"{rollout.group_id} ({rollout.group_size})" if rollout.group_id else ""
    yield "priority", str(rollout.priority) if rollout.priority else ""
    yield "labels", _pairs(rollout.required_labels)
    yield "policy", _policy(rollout.policy)
    yield "runs again", rollout.metadata.get(RETRY_OF, "")
    yield "created", when(rollout.create_time)
    yield "not before", when(rollout.not_before_time)
    yield "retry at", when(rollout.retry_time)
    yield "deadline", when(rollout.deadline_time)
    yield "ended", when(rollout.end_time)
    yield "attempts", f"{rollout.ended_attempt_count} ended" if rollout.ended_attempt_count else ""
    yield "task", rollout.input.decode("utf-8", errors="replace")


def attempt_text(attempt: attempt_pb2.Attempt) -> str:
    """Formats one attempt: how it ended, runner, times, rewards, outcome and failure."""
    state = " ".join(filter(None, (enum_word(attempt, "state"), enum_word(attempt, "failure_kind"))))
    decided = ", decided the rollout" if attempt.final else ""
    lines = [
        f"attempt {parse_attempt_name(attempt.name).number}: {state}{decided}",
        f"  runner     {attempt.runner_host or attempt.runner}",
        f"  time       {when(attempt.start_time)} to {when(attempt.end_time) or 'now'}{_took(attempt)}",
    ]
    if attempt.HasField("progress"):
        lines.append(f"  progress   {progress_text(attempt.progress)}, at {when(attempt.progress.update_time)}")
    for reward in attempt.rewards:
        step = f" at step {reward.step}" if reward.HasField("step") else ""
        lines.append(f"  reward     {reward.dimension or 'reward'} {reward.value:g}{step}")
    if attempt.output:
        lines.append(f"  outcome    {attempt.output.decode('utf-8', errors='replace')[:MAX_OUTPUT_SHOWN]}")
    if attempt.failure_message:
        lines.append("  failure    " + _indented(attempt.failure_message))
    lines += [
        f"  {label:<10} {_indented(text.rstrip())}"
        for label, text in (("stdout", attempt.printed.stdout), ("stderr", attempt.printed.stderr))
        if text
    ]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return text.replace("\n", "\n             ")


def _took(attempt: attempt_pb2.Attempt) -> str:
    if not attempt.HasField("end_time"):
        return f", {_seconds(attempt.timeout)} at most" if attempt.HasField("timeout") else ""
    return f" ({(attempt.end_time.ToNanoseconds() - attempt.start_time.ToNanoseconds()) / 1e9:.1f} s)"


def _tokens(rollout: rollout_pb2.Rollout) -> str:
    if not rollout.HasField("prompt_token_count"):
        return ""
    return f"{rollout.prompt_token_count:,} in prompts, {rollout.completion_token_count:,} sampled"


def _policy(policy: rollout_pb2.RolloutPolicy) -> str:
    kinds = [failure_pb2.FailureKind.Name(kind).removeprefix("FAILURE_KIND_").lower() for kind in policy.retry_on]
    parts = [
        f"{policy.max_attempts} attempts" if policy.max_attempts else "",
        f"{_seconds(policy.attempt_timeout)} each" if policy.HasField("attempt_timeout") else "",
        _bound(policy),
        f"again after {', '.join(kinds)}" if kinds else "",
        "hedged" if policy.hedged else "",
    ]
    return ", ".join(filter(None, parts))


def _bound(policy: rollout_pb2.RolloutPolicy) -> str:
    if not policy.attempt_timeout_quantile:
        return ""
    factor = policy.attempt_timeout_factor or DEFAULT_FACTOR
    return f"or {factor:g} times what {policy.attempt_timeout_quantile:.4g} of its task type take, if shorter"


def _seconds(duration: Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e9:g} s"


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))
