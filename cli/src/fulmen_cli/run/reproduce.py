"""`fulmen run reproduce`: does a training run again with the same settings, inputs and first weights, and compares."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.ids import training_run_name
from fulmen.rpc.services import Services
from fulmen.training.following import follow_run
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.names import run_name, short_name
from fulmen_cli.output import as_dict, console, enum_word, print_json_line
from fulmen_cli.run.compare import RunHistory, differing, read_history
from fulmen_cli.run.progress import RunProgress
from fulmen_cli.run.states import RunArgument

__all__ = ["reproduce"]

RANDOM_BYTES: Final = 2
MAX_ID_LENGTH: Final = 63
BASE: Final = "policy.base"
FIRST_VERSION: Final = "policy.first_version"
# What depends on the weights and the rollouts alone. Times and rates are never the same twice.
COMPARED: Final = ("loss", "grad_norm", "reward_mean", "validation_accuracy", "validation_loss", "entropy_estimate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The first step of which a figure is not the same, and both values."""

    step: int
    metric: str
    before: float | None
    after: float | None


async def reproduce(
    connection: Connection,
    run: RunArgument,
    exact: Annotated[bool, typer.Option("--exact", help="Fail if a compared metric differs at any step.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Repeats a training run: same algorithm, settings, seeds, inputs and initial weights.

    Reports differences of the environment (packages, machine, contents of inputs), follows the new run to its end,
    and compares loss, gradient norm, reward and validation of every step. The new run publishes further versions of
    the same policy. Rollouts that end in another order form different batches, so an asynchronous run
    (`max_staleness` above 0) is close but seldom identical; see docs/metrics.md.

    With --output json, prints one event per line, as `fulmen run watch` does; the last line is the comparison.

    Examples:

        fulmen run reproduce arithmetic-20260314-101500-x7k2-2-grpo

        fulmen run reproduce arithmetic-20260314-101500-x7k2-1-sft --exact
    """
    as_json = output is Output.JSON
    async with connection.open() as client:
        first = await read_history(client, await run_name(run, connection, client))
        if not first.run.provenance:
            raise CommandFailed(f"{first.run.name} has never run.")
        created = await _created(client, first.run)
        name = short_name(created.name)
        if not as_json:
            console().print(f"{short_name(first.run.name)} is repeated as {name}")
        with RunProgress(console(), name, step_count=created.step_count, as_json=as_json) as shown:
            async for event in follow_run(client, created.name, on_interruption=shown.interrupted):
                shown.show(event)
        second = await read_history(client, created.name)
    if second.run.state != training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED:
        raise CommandFailed(
            f"{second.run.name} ended {enum_word(second.run, 'state')}: {second.run.failure_message or 'see its report'}"
        )
    environment = differing(first.run.provenance, second.run.provenance)
    deviation = first_deviation(first, second)
    if as_json:
        print_json_line(_as_json(first, second, environment, deviation))
    else:
        _print(first, second, environment, deviation)
    if exact and deviation is not None:
        raise CommandFailed(f"{deviation.metric} differs from step {deviation.step} onwards.")


async def _created(client: Services, run: training_run_pb2.TrainingRun) -> training_run_pb2.TrainingRun:
    """Creates the same run under another name."""
    ending = f"-again-{secrets.token_hex(RANDOM_BYTES)}"
    short = short_name(run.name)[: MAX_ID_LENGTH - len(ending)].rstrip("-")
    again = training_run_pb2.TrainingRun(
        name=training_run_name(run.project, f"{short}{ending}"),
        project=run.project,
        display_name=run.display_name,
        algorithm=run.algorithm,
        settings_json=run.settings_json,
        inputs=run.inputs,
    )
    if run.HasField("policy"):
        again.policy.CopyFrom(run.policy)
    if version := run.provenance.get(FIRST_VERSION):
        # "The newest version" was this one when the run began.
        again.policy.version = version
    if base := run.provenance.get(BASE):
        # Likewise, "main" was this commit.
        again.policy.base = base
    request = training_run_service_pb2.CreateTrainingRunRequest(training_run=again, request_id=again.name)
    return (await client.training_runs.CreateTrainingRun(request)).training_run


def first_deviation(first: RunHistory, second: RunHistory) -> Deviation | None:
    """Finds the first step, and of it the first figure, that is not the same; None if all are."""
    for pair in _by_step(first, second):
        step, before, after = pair
        for metric in COMPARED:
            if not _same(before.get(metric), after.get(metric)):
                return Deviation(step=step, metric=metric, before=before.get(metric), after=after.get(metric))
    return None


def _same(before: float | None, after: float | None) -> bool:
    # A skipped step may have reported NaN, and then does so again.
    return before == after or (before != before and after != after)


def _by_step(first: RunHistory, second: RunHistory) -> Sequence[tuple[int, Mapping[str, float], Mapping[str, float]]]:
    one = {step.step: step.values for step in first.steps}
    other = {step.step: step.values for step in second.steps}
    return [(step, one.get(step, {}), other.get(step, {})) for step in sorted(one.keys() | other.keys())]


def _print(
    first: RunHistory, second: RunHistory, environment: Mapping[str, tuple[str, str]], deviation: Deviation | None
) -> None:
    screen = console()
    if environment:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("made with", "then", "now"):
            table.add_column(column, overflow="fold")
        for name, (then, now) in environment.items():
            table.add_row(Text(name), Text(then), Text(now))
        screen.print(table)
    else:
        screen.print("Same packages, machine and inputs.")
    if deviation is None:
        screen.print(f"All {len(second.steps)} steps have the same metrics.")
        return
    screen.print(
        f"Identical up to step {deviation.step}, where {deviation.metric} is {_number(deviation.after)} "
        f"and was {_number(deviation.before)}."
    )
    for name in sorted(first.run.results.keys() & second.run.results.keys()):
        screen.print(f"{name:<32}{first.run.results[name]:>12g}{second.run.results[name]:>12g}", markup=False)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"


def _as_json(
    first: RunHistory, second: RunHistory, environment: Mapping[str, tuple[str, str]], deviation: Deviation | None
) -> dict[str, Any]:
    found = None
    if deviation is not None:
        found = {
            "step": deviation.step,
            "metric": deviation.metric,
            "before": deviation.before,
            "after": deviation.after,
        }
    return {
        "runs": [as_dict(first.run), as_dict(second.run)],
        "environment": {name: list(pair) for name, pair in environment.items()},
        "first_deviation": found,
    }
