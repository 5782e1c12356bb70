"""Writes what came of a training: `report.md`, `curve.png`, and the lines that are printed at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import training_run_pb2
from fulmen_cli.train.samples import Sample, SamplePair

__all__ = ["StageOutcome", "accuracy_line", "compared_stage", "print_summary", "save_report", "trained_model"]

_HEADING: Final = re.compile(r"^(#+) ", re.MULTILINE)
BEFORE = "validation_accuracy_before"
AFTER = "validation_accuracy_after"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """One finished stage: its run, how long it took in seconds, and the service's report of it."""

    run: training_run_pb2.TrainingRun
    seconds: float
    markdown: str
    curve_png: bytes


def compared_stage(outcomes: list[StageOutcome]) -> StageOutcome | None:
    """Returns the last stage that was measured before and after; None if none was."""
    return next((each for each in reversed(outcomes) if {BEFORE, AFTER} <= set(each.run.results)), None)


def accuracy_line(outcomes: list[StageOutcome]) -> str:
    """Returns the machine-readable last line; empty if no stage measured anything.

    Of several stages that did, the last one counts: the figure is what the reinforcement learning itself has added.
    """
    for outcome in reversed(outcomes):
        results = outcome.run.results
        if BEFORE in results and AFTER in results:
            return f"validation accuracy {results[BEFORE]:.2f} -> {results[AFTER]:.2f}"
        for key in ("test_pass_at_1", "validation_pass_at_1"):
            if key in results:
                low, high = results[f"{key}_low"], results[f"{key}_high"]
                return f"{key.partition('_')[0]} pass@1 {results[key]:.3f} ({low:.3f} to {high:.3f})"
    return ""


def print_summary(
    screen: Console, outcomes: list[StageOutcome], sample: SamplePair | None, folder: Path, *, has_store: bool
) -> None:
    """Prints the table, the sample, and where everything is; `has_store` tells whether traces can be asked for later."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("stage", "steps", "time", "validation before", "after", "policy version"):
        table.add_column(column, justify="left" if column in ("stage", "policy version") else "right")
    for outcome in outcomes:
        table.add_row(*(Text(cell) for cell in _row(outcome)))
    screen.print()
    screen.print(table)
    if sample is not None:
        screen.print()
        screen.print(Text(f"One validation task, before and after: {sample.before.task}"))
        screen.print(Text(f"  before: {_outcome(sample.before)}"))
        screen.print(Text(f"  after:  {_outcome(sample.after)}"))
        if has_store:
            screen.print(Text(f"  see them: fulmen trace {sample.after.rollout}", style="dim"))
    screen.print()
    screen.print(Text(f"trained model: {trained_model(outcomes) or '(none)'}"))
    screen.print(Text(f"report:        {folder / 'report.md'}"))


def save_report(folder: Path, title: str, outcomes: list[StageOutcome], sample: SamplePair | None) -> None:
    """Writes `report.md` and the curves; `curve.png` is that of the last stage that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", _summary(outcomes)]
    if sample is not None:
        parts.append(_sample_section(sample))
    last_curve = b""
    for number, outcome in enumerate(outcomes, start=1):
        body = _HEADING.sub(r"##\1 ", outcome.markdown.strip())
        parts.append(f"## Stage {number}: {outcome.run.algorithm}\n\n{body}")
        if outcome.curve_png:
            last_curve = outcome.curve_png
            curve = f"{number}-{outcome.run.algorithm}.png"
            (folder / curve).write_bytes(outcome.curve_png)
            parts.append(f"![The curve of stage {number}]({curve})")
    if last_curve:
        (folder / "curve.png").write_bytes(last_curve)
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _summary(outcomes: list[StageOutcome]) -> str:
    lines = ["| stage | steps | time | validation before | after | policy version |", "|---|--:|--:|--:|--:|---|"]
    lines += ["| " + " | ".join(_row(outcome)) + " |" for outcome in outcomes]
    accuracy = accuracy_line(outcomes)
    if model := trained_model(outcomes):
        lines += ["", f"Trained model: `{model}`"]
    return "\n".join(lines + (["", accuracy] if accuracy else []))


def trained_model(outcomes: list[StageOutcome]) -> str:
    """Returns the folder of the last stage that trained one; empty if none did."""
    return next((outcome.run.model_path for outcome in reversed(outcomes) if outcome.run.model_path), "")


def _sample_section(sample: SamplePair) -> str:
    return (
        "## One validation task, before and after\n\n"
        f"Task: `{sample.before.task}`\n\n"
        f"* before (`{sample.before.rollout}`): {_outcome(sample.before)}\n"
        f"* after (`{sample.after.rollout}`): {_outcome(sample.after)}"
    )


def _row(outcome: StageOutcome) -> tuple[str, ...]:
    run = outcome.run
    before, after = (f"{run.results[key]:.2f}" if key in run.results else "" for key in (BEFORE, AFTER))
    return (run.algorithm, str(run.step), f"{outcome.seconds:.1f} s", before, after, run.policy_version)


def _outcome(sample: Sample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    return f"{sample.outcome or '(nothing)'}  ({reward})"
