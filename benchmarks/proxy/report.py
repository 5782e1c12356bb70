"""What a run amounts to: claims with their goals, and a table to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import outcome
from benchmarks.proxy import peers
from benchmarks.proxy.fulmen import NAME

DIRECT = "direct"
Raw = Mapping[str, Any]
_SHORT_NAMES = {
    NAME: NAME,
    peers.FLOOR: "floor",
    peers.VLLM_ROUTER: "vLLM router",
    peers.AGENT_LIGHTNING_1: "AL 1.0.2",
    peers.LITELLM: "LiteLLM",
    peers.AGENT_LIGHTNING_0: "AL 0.3.0",
    DIRECT: DIRECT,
}
_LIMITS = (
    ("CPU per captured RL-sized call, 16 concurrent", "RL c16", 400.0),
    ("CPU per captured RL-sized call, 16 concurrent, ids injected and stripped", "RL c16, ids injected and stripped", 400.0),
    ("CPU per captured small call, 16 concurrent", "small c16", 330.0),
)  # fmt: skip
_TIMES_LESS = (
    ("CPU per RL-sized call at 16 concurrent", "RL c16", peers.LITELLM, 50.0),
    ("CPU per small call at 16 concurrent", "small c16", peers.LITELLM, 25.0),
    ("CPU per RL-sized call at 16 concurrent", "RL c16", peers.AGENT_LIGHTNING_1, 12.0),
    ("CPU per paced stream at 64 concurrent", "paced streams c64", peers.LITELLM, 20.0),
)
_ADDED = (
    ("latency added to a captured RL-sized call, 1 concurrent, p50", "RL c1", "p50_ms", 1.0),
    ("latency added to a captured small call, 1 concurrent, p50", "small c1", "p50_ms", 1.0),
    ("first token delayed, captured paced streams, 64 concurrent, p50", "paced streams c64", "first_p50_ms", 10.0),
)
_GROWTH_MIB = 0.5
"""Growth per 10,000 calls that counts as flat: with a million calls it would be 50 MiB."""
_WARM_AFTER = 50_000
"""Fewer calls than these say nothing about growth: a process still takes what it needs."""


def median(raw: Raw, case: str, name: str, field: str) -> float | None:
    """Returns the median of a figure over the rounds; None if it was not measured."""
    runs = raw["cases"].get(case, {}).get(name, [])
    values = [run[field] for run in runs if run["calls"] and run[field] is not None]
    return statistics.median(values) if values else None


def claims_of(raw: Raw) -> list[outcome.Claim]:
    """Returns the claims about what was measured, whether they hold or not."""
    return [*_cost_claims(raw), *_peer_claims(raw), *_fault_claims(raw)]


def _cost_claims(raw: Raw) -> Iterator[outcome.Claim]:
    for title, case, goal in _LIMITS:
        value = median(raw, case, NAME, "cpu_us_per_call")
        if value is not None:
            yield outcome.claim(title, value, "us", goal=goal, better="lower")
    for title, case, field, goal in _ADDED:
        through, direct = median(raw, case, NAME, field), median(raw, case, DIRECT, field)
        if through is not None and direct is not None:
            yield outcome.claim(title, through - direct, "ms", goal=goal, better="lower")
    if "import" in raw:
        yield outcome.claim("import of the service, CPU", raw["import"]["cpu_s"], "s", goal=0.6, better="lower")
        yield outcome.claim("import of the service, memory", raw["import"]["mb"], "MB", goal=70.0, better="lower")


def _peer_claims(raw: Raw) -> Iterator[outcome.Claim]:
    for title, case, peer, goal in _TIMES_LESS:
        own, other = median(raw, case, NAME, "cpu_us_per_call"), median(raw, case, peer, "cpu_us_per_call")
        if own and other:
            yield outcome.claim(f"{title}: {peer} by ours", other / own, "x", goal=goal, better="higher")
    case = "paced streams c64"
    own = median(raw, case, NAME, "cpu_us_per_call")
    router = median(raw, case, peers.VLLM_ROUTER, "cpu_us_per_call")
    if own and router:
        title = f"CPU per captured paced stream at 64 concurrent: ours by {peers.VLLM_ROUTER}"
        yield outcome.claim(title, own / router, "x", goal=2.0, better="lower")


def _fault_claims(raw: Raw) -> Iterator[outcome.Claim]:
    def none(title: str, value: float) -> outcome.Claim:
        return outcome.claim(title, value, "calls", goal=0.0, better="lower")

    # Of every case: one in which all calls fail has no figures that could fall short.
    own = {case: runs[NAME] for case, runs in raw["cases"].items() if NAME in runs}
    if own:
        yield none(
            "calls of all cases, failed or incomplete", sum(failed(run) for runs in own.values() for run in runs)
        )
    for run in own.get("1000 streams", ()):
        yield none("1,000 concurrent streams, failed or incomplete", failed(run))
    if "soak" in raw:
        soak = raw["soak"]
        yield none(f"{soak['calls']:,} calls, failed", failed(soak))
        if soak["calls"] >= _WARM_AFTER:
            title, growth = "growth of memory per 10,000 calls, once warm", soak["growth_mib_per_10k"]
            yield outcome.claim(title, growth, "MiB", goal=_GROWTH_MIB, better="lower")
    if "swap" in raw:
        yield none("weights swapped under 1,000 streams, failed", failed(raw["swap"]))
        moved = raw["swap"]["calls_after_swap"]
        title = "weights swapped under 1,000 streams, calls that the new backend got"
        yield outcome.claim(title, moved, "calls", goal=1000.0, better="higher")
    if "kill" in raw:
        kill = raw["kill"]
        yield none("one of two replicas killed, failed for good", sum(kill["errors"].values()))
        lost = max(0, kill["retried"] - kill["in_flight_at_most"])
        yield none("one of two replicas killed, broken calls beyond those in flight at it", lost)


def failed(run: Mapping[str, Any]) -> int:
    """Counts what went wrong in a run without a fault: errors, and calls that had to be made again."""
    return sum(run["errors"].values()) + run["retried"]


def holds(claim: outcome.Claim) -> bool:
    """True if a claim reaches its goal."""
    value, goal = float(str(claim["value"])), float(str(claim["goal"]))
    return value <= goal if claim["better"] == "lower" else value >= goal


def table(raw: Raw) -> str:
    """Returns the CPU per call of every proxy, then their times, as text."""
    names = [name for name in _SHORT_NAMES if any(name in runs for runs in raw["cases"].values())]
    parts = []
    for title, field in (("CPU us per call", "cpu_us_per_call"), ("p50 ms; of streams: first token", "")):
        rows = [[title, *(_SHORT_NAMES[name] for name in names)]]
        for case, runs in raw["cases"].items():
            shown = field or ("first_p50_ms" if "streams" in case else "p50_ms")
            rows.append([case, *(_cell(raw, case, name, shown, runs) for name in names)])
        parts.append(_aligned(rows))
    notes = [f"{name}: {said}" for name, said in raw.get("peers", {}).items() if said != "measured"]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _cell(raw: Raw, case: str, name: str, field: str, runs: Mapping[str, Sequence[Any]]) -> str:
    if name not in runs:
        return "-"
    value = median(raw, case, name, field)
    if value is None:
        return next((kind for run in runs[name] for kind in run["errors"]), "nothing")
    return f"{value:,.0f}" if field.startswith("cpu") else f"{value:,.2f}"


def verdicts(claims: Sequence[outcome.Claim]) -> str:
    """Returns a line for each claim, with whether it reaches its goal."""
    rows = [["claim", "value", "goal", ""]]
    for claim in claims:
        sign = "<=" if claim["better"] == "lower" else ">="
        value, goal = f"{claim['value']} {claim['unit']}", f"{sign} {claim['goal']}"
        rows.append([str(claim["name"]), value, goal, "pass" if holds(claim) else "SHORT"])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)
