"""The picture of the scaling curve: what was measured, and what the model says, by load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("tab:green", "tab:blue", "tab:orange", "tab:red")


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draws tokens per second against engines."""
    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
    for colour, (name, rows) in zip(COLOURS, raw["loads"].items(), strict=True):
        engines = [one["engines"] for one in rows]
        axes.plot(engines, [one["measured"]["answer_tokens_per_s"] for one in rows], "o", color=colour, label=name)
        axes.plot(engines, [one["model"]["tokens_per_s"] for one in rows], "--", color=colour, linewidth=1.0)
    axes.plot([], [], "--", color="tab:gray", linewidth=1.0, label="model, from one engine alone")
    axes.set_xlabel("engines")
    axes.set_ylabel("tokens sampled per second")
    axes.set_xlim(0.5, None)
    axes.set_ylim(0, None)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
