"""What the turns say: medians, spreads and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.store.peers.load import Settings
from benchmarks.store.peers.turn import Turn

Results = Mapping[str, Mapping[str, Any]]
BEGIN = "<!-- written by python -m benchmarks.store.peers -->"
END = "<!-- end of what it writes -->"


def summary(
    turns: Sequence[Turn], settings: Settings, tried: Sequence[tuple[Settings, float | None]]
) -> dict[str, Any]:
    """Returns the figures of a queue under one load, as they are written down."""

    def per_job(part: str) -> float:
        return round(statistics.median(getattr(turn, part) / turn.jobs for turn in turns) * 1e6, 1)

    return {
        "settings": settings,
        "tried": [{"settings": one, "rate": rate and round(rate, 1)} for one, rate in tried],
        "rates": [round(turn.rate, 1) for turn in turns],
        "jobs_per_cpu_second": [round(turn.per_cpu_second, 1) for turn in turns],
        "cpu_per_job": {f"{part}_us": per_job(f"{part}_cpu_s") for part in ("client", "server", "postgres")},
        "others_cores": [round(turn.others_cores, 2) for turn in turns],
    }


def rate(figures: Mapping[str, Any]) -> float:
    """Returns the median of jobs per second."""
    return float(statistics.median(figures["rates"]))


def per_cpu_second(figures: Mapping[str, Any]) -> float:
    """Returns the median of jobs per second of CPU."""
    return float(statistics.median(figures["jobs_per_cpu_second"]))


def page(raw: Results) -> str:
    """Returns the tables in Markdown: one for each load, the fastest queue first, then the settings and what does not compare."""
    loads = list(next(iter(raw.values()))["loads"])
    return "\n\n".join([_others(raw), *(_rates(name, raw) for name in loads), _differences(loads, raw)])


def write_page(path: Path, raw: Results) -> None:
    """Writes the tables into a page, between the lines that say where."""
    before, _, after = path.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    path.write_text(f"{before}{BEGIN}\n\n{page(raw)}\n\n{END}{after.partition(END)[2]}", encoding="utf-8")


def _others(raw: Results) -> str:
    cores = [taken for one in raw.values() for figures in one["loads"].values() for taken in figures["others_cores"]]
    least, median, most = min(cores), statistics.median(cores), max(cores)
    return f"In this run other work on the machine took {median:.1f} cores ({least:.1f} to {most:.1f})."


def _named(title: str, raw: Results) -> str:
    return f"{title} {raw[title]['version']}" + ("" if raw[title]["durable"] else " (in memory)")


def _rates(name: str, raw: Results) -> str:
    lines = [
        f"| {name} | jobs/s (least to most) | jobs per CPU-second | CPU per job: clients and workers, server, PostgreSQL |",
        "|---|---|---|---|",
    ]
    for title in sorted(raw, key=lambda one: -rate(raw[one]["loads"][name])):
        figures = raw[title]["loads"][name]
        cpu = figures["cpu_per_job"]
        server = f"{cpu['server_us']:,.0f}" if cpu["server_us"] else "–"
        postgres = f"{cpu['postgres_us']:,.0f}" if raw[title]["durable"] else "–"
        lines.append(
            f"| {_named(title, raw)} | {rate(figures):,.0f} ({min(figures['rates']):,.0f} to {max(figures['rates']):,.0f})"
            f" | {per_cpu_second(figures):,.0f} | {cpu['client_us']:,.0f}, {server}, {postgres} us |"
        )
    return "\n".join(lines)


def _differences(loads: Sequence[str], raw: Results) -> str:
    lines = [f"| queue | settings: {'; '.join(loads)} | what does not compare |", "|---|---|---|"]
    for title in raw:
        settings = [_words(raw[title]["loads"][name]["settings"]) for name in loads]
        lines.append(f"| {_named(title, raw)} | {'; '.join(dict.fromkeys(settings))} | {raw[title]['differs']} |")
    return "\n".join(lines)


def _words(settings: Settings) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
