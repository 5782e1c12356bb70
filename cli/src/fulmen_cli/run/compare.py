"""`fulmen run compare`: two training runs side by side: different settings, metrics, and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.rpc.services import Services
from fulmen.training.following import read_steps
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.names import run_name, short_name
from fulmen_cli.output import console, enum_word, print_json, working
from fulmen_cli.run.curves import read_curves
from fulmen_cli.run.states import RunArgument

__all__ = ["RunHistory", "compare", "differing", "read_history"]

CURVE_WIDTH: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_CURVES: Final = ("reward_mean", "validation_accuracy", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """A run and the metrics of its steps."""

    run: training_run_pb2.TrainingRun
    steps: Sequence[training_run_pb2.StepMetrics]

    @property
    def facts(self) -> dict[str, str]:
        """What was given: algorithm, settings and inputs."""
        settings = json.loads(self.run.settings_json or "{}")
        return {
            "algorithm": self.run.algorithm,
            **{name: json.dumps(value, ensure_ascii=False) for name, value in sorted(settings.items())},
            **{f"input {use}": version for use, version in sorted(self.run.inputs.items())},
        }

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of each metric, and the results."""
        last = {name: value for step in self.steps for name, value in sorted(step.values.items())}
        return {**last, **dict(sorted(self.run.results.items()))}

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The steps that measured a figure, with its values."""
        return [(step.step, step.values[name]) for step in self.steps if name in step.values]


async def compare(
    connection: Connection,
    first: RunArgument,
    second: RunArgument,
    picture: Annotated[
        Path | None, typer.Option(help="Also write the curves to this file, .png or .svg; needs matplotlib.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compares two training runs: settings that differ, metrics side by side, and the curves on one scale.

    A run that has not ended is compared up to its last step.

    Example:

        fulmen run compare arithmetic-20260314-101500-x7k2-2-grpo arithmetic-20260314-113000-p3ab-2-grpo

        fulmen run compare FIRST SECOND --picture curves.png
    """
    async with connection.open() as client:
        with working("Reading both runs…"):
            histories = [
                await _shown_history(client, await run_name(name, connection, client)) for name in (first, second)
            ]
    if picture is not None:
        _save_picture(picture, histories)
    unlike = differing(histories[0].facts, histories[1].facts)
    if output is Output.JSON:
        print_json(_as_json(histories, unlike))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", *(short_name(each.run.name) for each in histories)):
        table.add_column(column, overflow="fold")
    table.add_row("state", *(enum_word(each.run, "state") for each in histories))
    table.add_row("step", *(f"{each.run.step}/{each.run.step_count}" for each in histories))
    for name, pair in unlike.items():
        table.add_row(Text(name), *(Text(value) for value in pair))
    table.add_section()
    for name in sorted(histories[0].metrics.keys() | histories[1].metrics.keys()):
        table.add_row(Text(name), *(_number(each.metrics.get(name)) for each in histories))
    console().print(table)
    if not unlike:
        console().print("Same algorithm, settings and inputs.")
    for name in _CURVES:
        _print_curves(name, histories)


async def read_history(client: Services, name: str) -> RunHistory:
    """Reads a run and the metrics of all its steps from its events, as far as it is."""
    run = await _run(client, name)
    return RunHistory(run=run, steps=await read_steps(client, run))


async def _shown_history(client: Services, name: str) -> RunHistory:
    """Reads a run, its last metrics and curves from the store; from its events if the store has no history of it."""
    steps = await read_curves(client, name, drawn=_CURVES)
    if steps is None:
        return await read_history(client, name)
    return RunHistory(run=await _run(client, name), steps=steps)


async def _run(client: Services, name: str) -> training_run_pb2.TrainingRun:
    request = training_run_service_pb2.GetTrainingRunRequest(name=name)
    return (await client.training_runs.GetTrainingRun(request)).training_run


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Pairs the values that are not the same; a dash stands for one that is missing."""
    names = [*first, *(name for name in second if name not in first)]
    pairs = {name: (first.get(name, "–"), second.get(name, "–")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _print_curves(name: str, histories: Sequence[RunHistory]) -> None:
    curves = [each.curve(name) for each in histories]
    values = [value for curve in curves for _, value in curve if math.isfinite(value)]
    if not values:
        return
    low, high = min(values), max(values)
    last_step = max(step for curve in curves for step, _ in curve)
    console().print(Text(f"\n{name}: {low:g} to {high:g} over {last_step} steps", style="bold"))
    for curve in curves:
        console().print(Text(_sparkline(curve, low=low, high=high, last_step=last_step)), soft_wrap=True)


def _save_picture(file: Path, histories: Sequence[RunHistory]) -> None:
    try:
        from matplotlib.figure import Figure  # optional, and slow to import
    except ImportError:
        raise CommandFailed("--picture needs matplotlib: pip install 'fulmen[pictures]'") from None
    names = [name for name in _CURVES if any(each.curve(name) for each in histories)]
    if not names:
        raise CommandFailed("Neither run has metrics to plot.")
    figure = Figure(figsize=(7, 2.6 * len(names)), dpi=120, layout="constrained")
    for axes, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        for each in histories:
            points = each.curve(name)
            label = short_name(each.run.name)
            axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=label)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    figure.axes[0].legend(fontsize="small")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"Cannot write {file}: {error}") from None


def _sparkline(curve: Sequence[tuple[int, float]], *, low: float, high: float, last_step: int) -> str:
    """Draws a curve as a row of bars: the mean of what each column holds, a dot where it holds nothing."""
    width = min(CURVE_WIDTH, last_step + 1)
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in curve:
        if math.isfinite(value):
            columns[min(width - 1, step * width // (last_step + 1))].append(value)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((sum(column) / len(column) - low) * scale)] if column else "·" for column in columns)


def _number(value: float | None) -> Text:
    return Text("–" if value is None else f"{value:g}")


def _as_json(histories: Sequence[RunHistory], differing: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        "runs": [each.run.name for each in histories],
        "states": [enum_word(each.run, "state") for each in histories],
        "differing": {name: list(pair) for name, pair in differing.items()},
        "metrics": [each.metrics for each in histories],
        "curves": [{name: each.curve(name) for name in _CURVES if each.curve(name)} for each in histories],
    }
