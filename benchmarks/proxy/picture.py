"""The picture of a run: CPU per call beside the peers, and memory over the long run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.proxy import peers
from benchmarks.proxy.fulmen import NAME
from benchmarks.proxy.report import Raw, median

_PANELS = (
    ("RL c16", "one RL-sized call, 16 concurrent"),
    ("paced streams c64", "one paced stream of 66 events, 64 concurrent"),
)
_ORDER = (
    (peers.FLOOR, "uvicorn + aiohttp,\nnothing captured"),
    (peers.VLLM_ROUTER, "vLLM router 0.1.17,\nnothing captured"),
    (NAME, "Fulmen, everything\ncaptured"),
    (peers.AGENT_LIGHTNING_1, "Agent Lightning 1.0.2"),
    (peers.LITELLM, "LiteLLM 1.106.2"),
    (peers.AGENT_LIGHTNING_0, "Agent Lightning 0.3.0"),
)


def draw(raw: Raw, path: Path) -> None:
    """Draws what was measured; what was not is left out."""
    figure, axes = pyplot.subplots(1, 3, figsize=(18, 4.2), layout="constrained")
    for panel, (case, title) in zip(axes, _PANELS, strict=False):
        _bars(panel, raw, case, title)
    _memory(axes[2], raw.get("soak", {}))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: Any, raw: Raw, case: str, title: str) -> None:
    runs = raw["cases"].get(case, {})
    shown = [(label, name) for name, label in reversed(_ORDER) if name in runs]
    values = [median(raw, case, name, "cpu_us_per_call") for _, name in shown]
    colors = ["tab:blue" if name == NAME else "tab:gray" for _, name in shown]
    bars = axes.barh([label for label, _ in shown], [value or 0 for value in values], color=colors)
    own = median(raw, case, NAME, "cpu_us_per_call")
    axes.set_xscale("log")
    axes.set_xlim(left=50, right=max([value for value in values if value] or [1000]) * 30)
    for number, (bar, value) in enumerate(zip(bars, values, strict=True)):
        said = _answer(runs[shown[number][1]]) if value is None else f"{value:,.0f} us"
        if value is not None and own and value > own * 1.5:
            said += f" ({value / own:.0f}x)" if value >= own * 10 else f" ({value / own:.1f}x)"
        axes.text(max(value or 0, 55) * 1.08, bar.get_y() + bar.get_height() / 2, said, va="center")
    axes.set_title(f"CPU of the proxy, {title}", fontsize=10)


def _answer(runs: list[dict[str, Any]]) -> str:
    """Says what a proxy that made no stream answered instead."""
    kinds = {kind for run in runs for kind in run["errors"]}
    return "refuses streams" if "status 400" in kinds else "does not pass the stream on: " + ", ".join(sorted(kinds))


def _memory(axes: Any, soak: dict[str, Any]) -> None:
    samples = soak.get("memory_mb", [])
    axes.plot([at for at, _ in samples], [mb for _, mb in samples])
    axes.set_ylim(bottom=0, top=max([mb for _, mb in samples], default=100) * 1.2)
    axes.set_xlabel("captured RL-sized calls")
    axes.set_title("Resident memory of Fulmen's proxy, MB", fontsize=10)
