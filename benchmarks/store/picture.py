"""The picture of a run: rates beside the peers, and claims over a backlog in time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

BARS = (
    ("Fulmen, 64 per request", "durable rollout cycles, 64 per request"),
    ("Fulmen, ten 1 kB spans each", "durable rollout cycles with ten 1 kB spans each"),
    ("Fulmen, one per request (streams)", "durable rollout cycles, one per request over 64 streams"),
    ("Fulmen, one per call", "durable rollout cycles, one per call of 64 clients"),
    ("plain asyncpg, 3 commits each", "plain asyncpg, 32 connections"),
    ("Agent Lightning 0.3.0, OTLP batch, ten spans", "Agent Lightning 0.3.0, otlp"),
    ("Agent Lightning 0.3.0, SDK, ten spans", "Agent Lightning 0.3.0, sdk"),
)


def draw(raw: Mapping[str, Any], path: Path) -> None:
    """Draws what was measured; parts that were not measured are left out."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    _bars(left, raw)
    _backlog(right, raw.get("backlog", {}))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: Any, raw: Mapping[str, Any]) -> None:
    shown = [(title, statistics.median(raw[name]["rates"])) for title, name in BARS if name in raw]
    titles, rates = zip(*reversed(shown), strict=True)
    colors = ["tab:blue" if title.startswith("Fulmen") else "tab:gray" for title in titles]
    bars = axes.barh(titles, rates, color=colors)
    axes.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(right=max(rates) * 6)
    axes.set_title("rollouts per second, whole life, 2 cores for everything")


def _backlog(axes: Any, backlog: Mapping[str, Any]) -> None:
    periods = backlog.get("periods", [])
    axes.plot([period["at_s"] for period in periods], [period["claim_p50_ms"] for period in periods], marker="o")
    if "snapshot_s" in backlog:
        axes.axvspan(*backlog["snapshot_s"], color="tab:orange", alpha=0.2, label="a snapshot is held open")
        axes.legend(loc="lower right")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of churn")
    axes.set_title(f"claim of 64 rollouts, p50 ms, {backlog.get('rollouts', 0):,} waiting")
