"""Metrics without a goal, drawn from the raw ones: where the time goes, and what the trainer alone does."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

Metric = dict[str, object]


def figures_of(raw: Mapping[str, Any]) -> list[Metric]:
    """Summarises what was measured, of the parts that are there."""
    found = []
    for example, seeds in _cases(raw, "learning"):
        for metric, unit, title in (
            ("trainer_share", "share", "trainer's share of time in reinforcement learning"),
            ("packing_efficiency", "share", "packing efficiency"),
            ("calls_per_row", "calls", "model calls per training row"),
            ("rollouts_per_second", "1/s", "rollouts per second"),
            ("minutes", "min", "time of both stages"),
        ):
            found.append(_figure(f"{title}, {example}, median of {len(seeds)}", median(s[metric] for s in seeds), unit))
    for case, metrics in _cases(raw.get("trainer", {}), "cases"):
        found.append(_figure(f"trainer, {case}", metrics["tokens_per_second"], "tokens/s"))
        found.append(_figure(f"trainer, {case}, largest process", metrics["peak_mib"], "MiB"))
        found.append(_figure(f"trainer, {case}, packing efficiency", metrics["packing_efficiency"], "share"))
    return found


def _cases(raw: Mapping[str, Any], part: str) -> list[tuple[str, Any]]:
    return [(name, metrics) for name, metrics in raw.get(part, {}).items() if name != "measured"]


def _figure(name: str, value: float, unit: str) -> Metric:
    return {"name": name, "value": round(value, 3), "unit": unit}
