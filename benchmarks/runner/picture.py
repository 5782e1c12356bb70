"""The picture of a run: attempts per second, and memory over concurrent attempts, beside the peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.runner import density, throughput
from benchmarks.runner.peers import NAME


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draws what was measured."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 3.6), layout="constrained")
    _rates(left, raw)
    _memory(right, raw)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _rates(axes: Any, raw: Mapping[str, Any]) -> None:
    shown = {"Fulmen, one runner": statistics.median(run["per_s"] for run in raw[throughput.TITLE]["runs"])}
    for runners in (2, 8):
        shown[f"{NAME}, {runners} runners"] = raw[f"{NAME}, {throughput.TITLE}, {runners} runners"]["per_s"]
    titles, rates = list(reversed(shown)), list(reversed(shown.values()))
    bars = axes.barh(
        titles, rates, color=["tab:blue" if title.startswith("Fulmen") else "tab:gray" for title in titles]
    )
    axes.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(left=10, right=max(rates) * 6)
    axes.set_title("attempts per second of a trivial agent, 2 cores for everything", fontsize=9)


def _memory(axes: Any, raw: Mapping[str, Any]) -> None:
    shown = {
        f"Fulmen, {kind} agents": raw[f"{density.SLOTS} concurrent attempts, {kind} agent"]["peak_mb"]
        for kind in density.KINDS
    }
    shown[NAME] = raw[f"{NAME}, one concurrent attempt"]["peak_mb"] * density.SLOTS
    titles, sizes = list(reversed(shown)), list(reversed(shown.values()))
    bars = axes.barh(
        titles, sizes, color=["tab:blue" if title.startswith("Fulmen") else "tab:gray" for title in titles]
    )
    axes.bar_label(bars, labels=[f"{size / 1000:,.2f} GB" for size in sizes], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(left=10, right=max(sizes) * 12)
    axes.set_xlabel("MB")
    axes.set_title(f"memory of {density.SLOTS} at once (peer: one process x {density.SLOTS})", fontsize=9)
