"""Tables and picture of what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.exchange.convergence.cases import Cell, Learned, Task
from benchmarks.exchange.convergence.report import UNITS, Line

MARKS = ("<!-- convergence: begin -->", "<!-- convergence: end -->")
TITLES = {Task.TEXT: "A small transformer on text", Task.ARITHMETIC: "GRPO on arithmetic"}
FINALS = {Task.TEXT: "loss, nats per byte", Task.ARITHMETIC: "reward, last 10 steps"}
LEFT_OUT = ("codec", "policy", "dense_below")
"""Settings that stand elsewhere in the table."""


def markdown(lines: Mapping[Task, Sequence[Line]], tried: Sequence[tuple[Cell, Learned]]) -> str:
    """Writes all tables."""
    parts = [_task(task, found) for task, found in lines.items()]
    if tried:
        parts.append(_tried(tried))
    return "\n".join(line for part in parts for line in (*part, ""))


def _task(task: Task, lines: Sequence[Line]) -> list[str]:
    found = [f"### {TITLES[task]}", ""]
    for dense in (line for line in lines if not line.case.dense):
        spread = f", spread {dense.spread:.4f} over {len(dense.learned)} seeds" if dense.spread is not None else ""
        found += [
            f"`{dense.case.name}`, {dense.case.ranks} ranks: {dense.final:.4f}{spread}; {_bytes(dense)} bytes of a rank in each step.",
            "",
            f"| exchange | rate | {FINALS[task]} | worse by | in spreads | verdict | bytes of a step | ratio, whole run |"
            " ratio, second half | distance |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_line(line) for line in lines if line.case.dense == dense.case.name),
            "",
        ]
    return found[:-1]


def _line(line: Line) -> str:
    case, verdict = line.case, line.verdict
    settings = ", ".join(f"{name} {_plain(value)}" for name, value in case.exchange.items() if name not in LEFT_OUT)
    name = f"`{case.exchange['codec']}`" + (f" {settings}" if settings else "") + (" (refused)" if case.trap else "")
    final = f"{line.final:.4f}" + (f" ± {line.spread:.4f}" if line.spread is not None else "")
    beside = ["", "", ""]
    if verdict is not None:
        beside = [f"{verdict.worse_by:+.4f}", f"{verdict.spreads:+.1f}", verdict.text(UNITS[case.task])]
    cells = [name, f"{case.rate:g}", final, *beside, _bytes(line), f"{line.ratio:.1f}x", f"{line.late_ratio:.1f}x"]
    cells.append("" if line.distance is None else f"{line.distance:.2f}")
    return f"| {' | '.join(cells)} |"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items() if name != "kind")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bytes(line: Line) -> str:
    return f"{fmean(one.sent_bytes for one in line.learned.values()):,.0f}"


def _tried(tried: Sequence[tuple[Cell, Learned]]) -> list[str]:
    """Writes what learning rates came to on the seed on which they were chosen."""
    by_case: dict[tuple[Task, str], list[str]] = {}
    for cell, learned in tried:
        mark = "**" if cell.rate == cell.case.rate else ""
        by_case.setdefault((cell.case.task, cell.case.name), []).append(
            f"{mark}{cell.rate:g}: {learned.final:.4f}{mark}"
        )
    return [
        "### Learning rates that were tried, on a seed that is not reported",
        "",
        "| task | exchange | rate: what it came to |",
        "|---|---|---|",
        *(f"| {task} | {name} | {', '.join(found)} |" for (task, name), found in by_case.items()),
    ]


def replace_part(document: Path, text: str) -> None:
    """Replaces what stands between the marks.

    Raises:
        ValueError: if the marks are not there.
    """
    begin, end = MARKS
    old = document.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{document} has no place for the tables: {begin} and {end}")
    before, after = old.split(begin)[0], old.split(end)[1]
    document.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def draw(lines: Mapping[Task, Sequence[Line]], path: Path) -> None:
    """Draws the curves, a panel for each dense case and what is held against it: the mean over the seeds."""
    from matplotlib.figure import Figure  # slow to import

    panels = [
        (task, dense, [line for line in found if line.case.dense == dense.case.name])
        for task, found in lines.items()
        for dense in found
        if not dense.case.dense
    ]
    columns = 2
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(9.6, 3.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (task, dense, others) in zip(grid.flat, panels, strict=False):
        _curves(axes, task, dense, others)
    figure.savefig(path, dpi=110)


def _curves(axes: Any, task: Task, dense: Line, others: Sequence[Line]) -> None:
    for line in (dense, *others):
        steps = [step for step, _ in next(iter(line.learned.values())).curve]
        values = [
            fmean(each) for each in zip(*([v for _, v in one.curve] for one in line.learned.values()), strict=True)
        ]
        style: dict[str, Any] = {"color": "black", "linewidth": 2.0} if line is dense else {"linewidth": 1.1}
        if line.case.trap:
            style["linestyle"] = "--"
        axes.plot(steps, values, label=f"{line.case.name}, {line.ratio:.3g}x", **style)
    axes.set_xlabel("optimiser steps" if task is Task.TEXT else "training steps")
    axes.set_ylabel("held-out loss, nats per byte" if task is Task.TEXT else "greedy accuracy, held-out tasks")
    if task is Task.TEXT:
        lowest = min(value for line in (dense, *others) for one in line.learned.values() for _, value in one.curve)
        axes.set_ylim(lowest - 0.05, lowest + 1.2)
    axes.set_title(f"{TITLES[task]}, against {dense.case.name} (mean of seeds)", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)
