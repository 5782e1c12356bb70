"""The picture of the benchmark: seconds of a step of every contender, a panel for each line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

from benchmarks.exchange.contenders import COMPUTE, CONTENDERS, By
from benchmarks.exchange.lines import LINES

COLOURS = {By.NOBODY: "tab:gray", By.PYTORCH: "tab:orange", By.FULMEN: "tab:blue"}


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draws what was measured with the most ranks; no file if there is nothing."""
    there = [line for name, line in LINES.items() if raw.get(name)]
    if not there:
        return
    figure, grid = pyplot.subplots(
        1, len(there), figsize=(2.2 + 2.9 * len(there), 4.8), layout="constrained", sharey=True, squeeze=False
    )
    for axes, line in zip(grid[0], there, strict=True):
        most = max((key for key in raw[line.name] if key.isdigit()), key=int)
        _panel(axes, raw[line.name][most]["contenders"])
        axes.set_title(f"{line.text}, {most} ranks", fontsize=9)
        axes.set_xlabel("seconds of a step")
    patches = [Patch(color=COLOURS[by], label=label) for by, label in ((By.PYTORCH, "PyTorch"), (By.FULMEN, "Fulmen"))]
    grid[0][-1].legend(handles=patches, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Any, contenders: Mapping[str, Any]) -> None:
    names = list(reversed(CONTENDERS))
    steps = [contenders[name]["step_s"] if name in contenders else None for name in names]
    medians = [step["median"] if step else 0.0 for step in steps]
    spreads = [[step["median"] - step["q1"], step["q3"] - step["median"]] if step else [0.0, 0.0] for step in steps]
    bars = axes.barh(
        names,
        medians,
        xerr=list(zip(*spreads, strict=True)),
        color=[COLOURS[CONTENDERS[name].by] for name in names],
        error_kw={"linewidth": 0.8},
    )
    axes.bar_label(bars, labels=[f"{each:.2g}" if each else "" for each in medians], padding=3, fontsize=7)
    axes.axvline(contenders[COMPUTE.name]["step_s"]["median"], color="tab:gray", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.25 * max(medians))
    axes.tick_params(labelsize=7)
    axes.grid(axis="x", alpha=0.25)
