"""`fulmen rollout export`: trajectories as a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fulmen.model_call import ModelCallInvalid
from fulmen.row_files import ExtraMissing, FileFormat, RowWriter, writing
from fulmen.rpc.services import Services
from fulmen.scores import ScoresInvalid, read_scores
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen.trajectories import (
    AttemptReward,
    CreditOption,
    CreditSettings,
    CreditSettingsInvalid,
    assign_credit,
    attach,
    read_rewards,
)
from fulmen.trajectories.export import COLUMNS, View, records
from fulmen.trajectories.stored import StoredAttempt, stored_attempts
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import run_name
from fulmen_cli.output import console, print_json
from fulmen_cli.rollout.rescore.scores import found_scores

__all__ = ["register"]


class Ended(StrEnum):
    """Final states of a rollout."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


def register(rollout: typer.Typer) -> None:
    """Adds the command to the group."""
    remote_command(rollout, "export")(export)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rollouts to export."""

    run: Annotated[str, typer.Option(help="Only rollouts of this training run.")] = ""
    state: Annotated[
        list[Ended] | None, typer.Option(help="Only rollouts in this state. May be repeated. Default: succeeded.")
    ] = None
    where: Annotated[str, typer.Option("--filter", help="Only rollouts that match, as in `rollout list`.")] = ""
    agent: Annotated[str | None, typer.Option(help="Only calls of this agent or role; '' for calls without one.")] = (
        None
    )
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rollouts, newest first.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """How rewards are credited to calls."""

    credit: Annotated[CreditOption, typer.Option(help="How rewards are credited to calls.")] = CreditOption.FINAL
    gamma: Annotated[float | None, typer.Option(help="Discount per step, for --credit discounted.")] = None
    weight: Annotated[
        list[str] | None,
        typer.Option(help="DIMENSION=WEIGHT. May be repeated. By default only the dimension `reward`."),
    ] = None
    scores: Annotated[
        str,
        typer.Option(
            help="Use the rewards of these published scores, NAME or NAME@VERSION; rollouts without a score are left out."
        ),
    ] = ""


async def export(
    connection: Connection,
    file: Annotated[Path, typer.Argument(help="File to write; an existing one is replaced at the end.")],
    selection: Selection,
    rewards: RewardOptions,
    view: Annotated[
        View,
        typer.Option(
            help="Content of a line: a training row (calls merged by token id), a triplet (one model call: prompt, response, reward), or the messages of a conversation."
        ),
    ] = View.ROWS,
    file_format: Annotated[FileFormat, typer.Option("--format", help="JSON lines, or Parquet.")] = FileFormat.JSONL,
    output: OutputOption = Output.TABLE,
) -> None:
    """Exports trajectories of finished rollouts, with rewards, to a file.

    Examples:

        fulmen rollout export rows.parquet --format parquet --run arithmetic-20260314-101500-x7k2-2-grpo

        fulmen rollout export sft.jsonl --view messages --filter 'task_type = "arithmetic"'

        fulmen rollout export calls.jsonl --view triplets --credit discounted --gamma 0.9

        fulmen rollout export rows.jsonl --scores scores.better --run arithmetic-20260314-101500-x7k2-2-grpo
    """
    try:
        settings = CreditSettings(
            option=rewards.credit,
            gamma=rewards.gamma,
            weights=dict(map(_weight, rewards.weight)) if rewards.weight else None,
        )
    except CreditSettingsInvalid as error:
        raise CommandFailed(str(error), exit_code=Exit.USAGE) from None
    request = rollout_service_pb2.ListRolloutsRequest(
        states=[
            rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{each.upper()}")
            for each in selection.state or (Ended.SUCCEEDED,)
        ],
        filter=selection.where,
    )
    exporter = _Exporter(view=view, settings=settings, agent=selection.agent)
    try:
        async with connection.open() as client:
            request.training_run = await run_name(selection.run, connection, client)
            if rewards.scores:
                exporter.rewards = await _scored(client, rewards.scores)
            with writing(file_format, file, COLUMNS[view]) as writer:
                await exporter.run(client, request, writer, selection.limit)
    except ExtraMissing as error:
        raise CommandFailed(str(error)) from None
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror or error}.") from None
    if output is Output.JSON:
        print_json(exporter.summary())
    else:
        exporter.print_summary(file)


@dataclass(slots=True, kw_only=True)
class _Exporter:
    """Writes attempts to a file and counts them."""

    view: View
    settings: CreditSettings
    agent: str | None
    rewards: Mapping[str, tuple[AttemptReward, ...]] | None = None
    rollouts: int = 0
    written: int = 0
    unreadable: int = 0
    unscored: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)
    unattached: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)

    async def run(
        self,
        client: Services,
        request: rollout_service_pb2.ListRolloutsRequest,
        writer: RowWriter,
        limit: int | None,
    ) -> None:
        """Writes all attempts of the rollouts that the request selects."""
        shown = Progress(
            SpinnerColumn(), TextColumn("{task.completed} rollouts, {task.fields[rows]} {task.fields[view]}"),
            TimeElapsedColumn(), console=console(stderr=True), transient=True,
        )  # fmt: skip
        with shown:
            task = shown.add_task("export", total=None, rows=0, view=self.view.value)
            async for stored in stored_attempts(client, request, limit=limit):
                self._copy(stored, writer)
                shown.update(task, completed=self.rollouts, rows=self.written)

    def summary(self) -> dict[str, Any]:
        """Returns the counts."""
        return {
            "rollouts": self.rollouts,
            self.view.value: self.written,
            "unreadable_rollouts": self.unreadable,
            "unscored_rollouts": self.unscored,
            "dropped_calls": dict(self.drops),
            "row_breaks": dict(self.breaks),
            "unattached_rewards": dict(self.unattached),
            "missing_dimensions": dict(self.missing),
        }

    def print_summary(self, file: Path) -> None:
        """Prints the counts, with the omitted items if there are any."""
        screen = console(stderr=True)
        noun = self.view.value
        screen.print(f"{self.written} {noun} of {self.rollouts} rollouts in {file}.", soft_wrap=True)
        for text, counts in (
            ("calls are in no row", self.drops),
            ("rewards score no call", self.unattached),
            ("rewards that --weight names are missing", self.missing),
        ):
            if counts:
                reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
                screen.print(f"{counts.total()} {text}: {reasons}.", soft_wrap=True)
        if self.unscored:
            screen.print(f"{self.unscored} rollouts without a score were skipped.", soft_wrap=True)
        if self.unreadable:
            screen.print(f"{self.unreadable} rollouts could not be read and were skipped.", soft_wrap=True)

    def _copy(self, stored: StoredAttempt, writer: RowWriter) -> None:
        self.rollouts += 1
        rewards = (
            read_rewards(stored.attempt.rewards) if self.rewards is None else self.rewards.get(stored.attempt.name)
        )
        if rewards is None:
            self.unscored += 1
            return
        if stored.trajectory is None:
            self.unreadable += 1
            return
        scored = attach(stored.trajectory, rewards)
        credit = assign_credit(scored, self.settings)
        try:
            rows = list(records(self.view, stored.attempt.name, scored, credit))
        except ModelCallInvalid:
            self.unreadable += 1
            return
        for row in rows:
            if self.agent is None or row["agent"] == self.agent:
                writer.write(row)
                self.written += 1
        self.drops.update({str(reason): count for reason, count in stored.trajectory.drops.items()})
        self.breaks.update({str(reason): count for reason, count in stored.trajectory.breaks.items()})
        self.unattached.update(str(each.reason) for each in scored.unattached)
        self.missing.update(credit.missing)


async def _scored(client: Services, name: str) -> dict[str, tuple[AttemptReward, ...]]:
    """Returns the rewards of published scores by attempt; rollouts without a score are left out."""
    version = await found_scores(client, name)
    try:
        scores = read_scores(version.content)
    except ScoresInvalid as error:
        raise CommandFailed(f"{version.name} cannot be read: {error}") from None
    return {
        each.attempt: tuple(
            AttemptReward(value=value, dimension=dimension, step=step, span_id=span_id)
            for (dimension, step, span_id), value in each.rewards.items()
        )
        for each in scores.rollouts
        if each.problem is None
    }


def _weight(text: str) -> tuple[str, float]:
    dimension, _, value = text.partition("=")
    try:
        return dimension, float(value)
    except ValueError:
        raise CommandFailed(f"--weight {text!r}: must have the form DIMENSION=NUMBER.", exit_code=Exit.USAGE) from None
