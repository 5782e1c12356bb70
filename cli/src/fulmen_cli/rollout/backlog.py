"""`fulmen queue`: queued rollouts, scheduling rules, and why rollouts wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from rich.text import Text

from fulmen.rpc.services import Services
from fulmen.store.v1 import queue_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.training.following import follow_queue
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.names import run_name
from fulmen_cli.output import as_dict, console, print_json, print_json_line, print_rows, when

__all__ = ["pause_text", "queue_line", "register", "rules_text"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "queue")(queue)


async def queue(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only this training run.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Print a line whenever it changes, until Ctrl-C.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows queued and running rollouts, and the scheduling rules.

    With `--watch --output json`, prints one state per line.

    Examples:

        fulmen queue

        fulmen queue --watch
    """
    async with connection.open() as client:
        training_run = await run_name(run, connection, client)
        if watch:
            await _watch(client, training_run, as_json=output is Output.JSON)
            return
        stats = await client.rollouts.GetQueueStats(pb.GetQueueStatsRequest(training_run=training_run))
    if output is Output.JSON:
        print_json([as_dict(stats)])
        return
    age = _seconds(stats.oldest_queued_age) if stats.queued_count else ""
    row = (stats.queued_count, stats.running_count, stats.delayed_count, age, stats.runner_count,
           stats.open_credit_count)  # fmt: skip
    columns = ("queued", "running", "delayed", "oldest waits", "runners", "free slots")
    print_rows(output, columns, [tuple(map(str, row))], messages=[stats], empty="")
    _print_details(stats)


def queue_line(message: queue_service_pb2.WatchQueueStatsResponse) -> str:
    """Formats a watched queue in one line: counts, then counts per label if any rollout requires labels."""
    stats = message.stats
    words = [f"{stats.queued_count} queued", f"{stats.running_count} running", f"{stats.delayed_count} delayed",
             f"{stats.runner_count} runners"]  # fmt: skip
    if stats.HasField("pause_time"):
        words.append("paused")
    words += [f"{_label_text(each.labels)}: {each.queued_count} queued" for each in message.backlog if each.labels]
    words += [f"no runner has {_label_text(each.labels)}" for each in stats.unmatched]
    return ", ".join(words)


async def _watch(client: Services, training_run: str, *, as_json: bool) -> None:
    printed = ""
    async for message in follow_queue(client, queue_service_pb2.WatchQueueStatsRequest(training_run=training_run)):
        if as_json:
            print_json_line(as_dict(message))
        elif (line := queue_line(message)) != printed:
            printed = line
            console().print(Text(f"{time.strftime('%H:%M:%S', time.gmtime())}  {line}"))


def _label_text(labels: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def rules_text(stats: pb.GetQueueStatsResponse) -> str:
    """Formats the project's weight, quotas and rules."""
    rules = stats.rules
    ageing = f"one priority per {_seconds(rules.ageing_interval)}" if rules.ageing_interval.ToNanoseconds() else "off"
    switches = (
        ("labels", rules.match_labels),
        ("affinity", rules.affinity),
        ("longest first", rules.longest_first),
        ("hedging", rules.hedging),
    )
    parts = [
        f"weight {stats.weight}" + ("" if rules.weighted_share else " (not counted)"),
        f"at most {stats.max_running} running" if stats.HasField("max_running") else "",
        f"at most {stats.max_queued} waiting" if stats.HasField("max_queued") else "",
        f"ageing {ageing}",
        *(f"{name} {'on' if on else 'off'}" for name, on in switches),
    ]
    return ", ".join(part for part in parts if part)


def pause_text(stats: pb.GetQueueStatsResponse) -> str:
    """Describes since when and why a queue is paused, and how to resume it; empty if it is not paused."""
    if not stats.HasField("pause_time"):
        return ""
    reason = f" ({stats.pause_reason})" if stats.pause_reason else ""
    return f"paused since {when(stats.pause_time)} UTC{reason}; `fulmen project resume` resumes it"


def _print_details(stats: pb.GetQueueStatsResponse) -> None:
    if text := pause_text(stats):
        console().print(f"\n{text}", style="yellow", markup=False)
    console().print(f"\nrules: {rules_text(stats)}")
    priorities = [
        (str(each.priority), str(each.queued_count), _seconds(each.oldest_queued_age)) for each in stats.priorities
    ]
    _print_table(("priority", "queued", "oldest waits"), priorities, stats.priorities)
    task_types = [
        (each.task_type, str(each.sample_count), _seconds(each.duration_p50), _seconds(each.duration_p95))
        for each in stats.task_types
    ]
    _print_table(("task type", "measured", "half took at most", "95 % took at most"), task_types, stats.task_types)
    unmatched = [
        (", ".join(f"{key}={value}" for key, value in sorted(each.labels.items())), str(each.queued_count))
        for each in stats.unmatched
    ]
    _print_table(("labels that no runner has", "queued"), unmatched, stats.unmatched)
    paused = [(each.agent, when(each.pause_time), each.rollouts[0]) for each in stats.paused_agents]
    _print_table(("paused agent", "since (UTC)", "last rollout that lost its runner"), paused, stats.paused_agents)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], messages: Sequence[Message]) -> None:
    if rows:
        console().print()
        print_rows(Output.TABLE, columns, rows, messages=messages, empty="")


def _seconds(duration: Duration) -> str:
    return f"{duration.ToTimedelta().total_seconds():.1f} s"
