"""`fulmen rollout watch`: prints rollouts as they change, or groups as they finish."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import attempt_pb2, rollout_changes_pb2, rollout_pb2, rollout_service_pb2
from fulmen.training.following import follow_changes, follow_groups
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.names import run_name, short_name
from fulmen_cli.output import as_dict, console, enum_word, print_json_line, when
from fulmen_cli.rollout.figures import progress_text, reward_text

__all__ = ["change_text", "register"]


def register(group: typer.Typer) -> None:
    """Adds the command."""
    remote_command(group, "watch")(watch)


async def watch(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only rollouts of this training run.")] = "",
    groups: Annotated[bool, typer.Option("--groups", help="Groups as they finish, from the first one on.")] = False,
    cursor: Annotated[str, typer.Option(help="Resume after this cursor.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Prints rollouts whenever they change, until Ctrl-C: each in its current state, with its latest attempt.

    Several changes within half a second are printed as one. With `--output json`, prints one message per line: several
    changes, or one group, with the cursor to resume from. The first line has only the cursor.

    Examples:

        fulmen rollout watch

        fulmen rollout watch --groups --run arithmetic-20260314-101500-x7k2-2-grpo
    """
    as_json = output is Output.JSON
    async with connection.open() as client:
        name = await run_name(run, connection, client)
        if groups:
            of_groups = rollout_service_pb2.WatchRolloutsRequest(training_run=name, cursor=cursor)
            async for group in follow_groups(client, of_groups):
                _print_group(group, as_json=as_json)
            return
        of_changes = rollout_changes_pb2.WatchRolloutChangesRequest(training_run=name, cursor=cursor)
        async for changes in follow_changes(client, of_changes):
            if as_json:
                print_json_line(as_dict(changes))
            for rollout in () if as_json else changes.rollouts:
                console().print(Text(change_text(rollout)))


def change_text(rollout: rollout_pb2.Rollout) -> str:
    """Formats a rollout that changed in one line: name, state, and what is known of its latest attempt."""
    words = [short_name(rollout.name), enum_word(rollout, "state"), enum_word(rollout, "failure_kind")]
    if rollout.HasField("retry_time"):
        words.append(f"until {when(rollout.retry_time)}")
    if rollout.HasField("reward"):
        words.append(f"reward {reward_text(rollout.reward)}")
    if rollout.priority:
        words.append(f"priority {rollout.priority}")
    if rollout.HasField("deadline_time"):
        words.append(f"deadline {when(rollout.deadline_time)}")
    if rollout.attempts:
        words.append(_attempt_words(rollout.attempts[-1]))
    line = "  ".join(filter(None, words))
    return f"{line}: {rollout.failure_message}" if rollout.failure_message else line


def _attempt_words(attempt: attempt_pb2.Attempt) -> str:
    number = parse_attempt_name(attempt.name).number
    outcome = enum_word(attempt, "failure_kind") or enum_word(attempt, "state")
    words = f"attempt {number} {outcome} on {attempt.runner_host or attempt.runner}"
    return f"{words}, {progress_text(attempt.progress)}" if attempt.HasField("progress") else words


def _print_group(group: rollout_service_pb2.FinishedGroup, *, as_json: bool) -> None:
    if as_json:
        print_json_line(as_dict(group))
        return
    words = [_rollout_words(rollout) for rollout in group.rollouts]
    console().print(Text(f"{group.group_id}: " + ", ".join(words)))


def _rollout_words(rollout: rollout_pb2.Rollout) -> str:
    rewards = [each.value for each in rollout.attempts[-1].rewards] if rollout.attempts else []
    failure = enum_word(rollout, "failure_kind")
    return " ".join([enum_word(rollout, "state"), *([failure] if failure else []), *(f"{each:g}" for each in rewards)])
