"""The picture of the benchmark: what the examples learn over time, the variants, and asynchronous over synchronous."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
Draw = Callable[[Any, Mapping[str, Any]], None]


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draws what was measured, a panel for each part that has one; no file if there is none."""
    panels: dict[str, Draw] = {"learning": _learning, "variants": _variants, "overlap": _overlap}
    there = [part for part in panels if part in raw]
    if not there:
        return
    metric, grid = pyplot.subplots(
        1, len(there), figsize=(4.4 * len(there), 3.7), layout="constrained", sharey=True, squeeze=False
    )
    for axes, part in zip(grid[0], there, strict=True):
        panels[part](axes, {name: one for name, one in raw[part].items() if name != "measured"})
        axes.set_ylim(0, 1.03)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, loc="lower right")
    grid[0][0].set_ylabel("greedy accuracy, held-out tasks")
    metric.savefig(path, dpi=110)
    pyplot.close(metric)


def _learning(axes: Any, raw: Mapping[str, Any]) -> None:
    for colour, (example, seeds) in zip(COLOURS, raw.items(), strict=False):
        for number, one in enumerate(seeds):
            times, values = zip(*one["curve"], strict=True)
            label = example if number == 0 else None
            axes.plot(times, values, color=colour, marker=".", linewidth=1.2, label=label)
    axes.set_xlabel("seconds of GRPO, after imitation")
    axes.set_title("what the examples learn (a line per seed)", fontsize=9)


def _variants(axes: Any, raw: Mapping[str, Any]) -> None:
    for colour, (algorithm, found) in zip(COLOURS, raw.items(), strict=False):
        for number, one in enumerate(found["seeds"]):
            steps, _, values = zip(*one["curve"], strict=True)
            label = algorithm.upper() if number == 0 else None
            axes.plot(steps, values, color=colour, marker=".", linewidth=1.2, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training steps")
    axes.set_title("variants on arithmetic, from the same weights", fontsize=9)


def _overlap(axes: Any, raw: Mapping[str, Any]) -> None:
    for colour, name in zip(COLOURS, ("asynchronous", "synchronous"), strict=False):
        curve = raw[name]["curve"]
        times, values = zip(*((at_s - curve[0][0], accuracy) for at_s, accuracy in curve), strict=True)
        axes.plot(times, values, color=colour, marker=".", linewidth=1.4, label=name)
    target = raw["target_validation_accuracy"]
    axes.axhline(target, color="tab:gray", linewidth=0.8, linestyle="--", label=f"target {target:g}")
    axes.set_xlabel("seconds since the first validation")
    axes.set_title("agents of uneven duration, same weights", fontsize=9)
