"""Benchmark of routing: agents with growing conversations over four engines, by rule and by load.

Method: agents run attempts of a seeded trace in a closed loop (groups of 8 that share a task, 6 to 18 turns, conversations that grow from 3,000
to about 18,000 tokens on average) against four simulated engines with the prefix cache and scheduler of vLLM and the timings of Llama 3.1 8B on an
H100 (`tests/support/llm_proxy/simulated_engine.py`), through the whole proxy with captures. Everything runs in one process, on a
clock that stands still while anything computes and leaps to the next timer otherwise: what the proxy and the machine need takes no
time on it, and figures are the same on a busy machine. The first 128 agents begin in the middle of an attempt, engines begin
empty; 20 s pass before 40 s count. Agents beyond these 128 begin with short conversations, which cost less, and an attempt lasts for
about half a minute: throughput at different numbers of agents is compared over 120 s, after 60 s. `round robin`, `attempt hash` (rendezvous hashing with bounded loads) and `oracle` (knows every cache and
queue) choose the engine here and call its own route; `sticky` and `prefix cache` are the proxy's.

Run `python -m benchmarks.routing [--short] [--only WORD]`; writes benchmarks/results/routing.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace

import structlog

from benchmarks import outcome
from benchmarks.routing.load import FITS, Case, run
from tests.support import leaping_clock

FULL, TWICE = 160, 320
"""Agents whose conversations nearly fill the caches, and twice as many."""

RULES = ("oracle", "round robin", "attempt hash", "prefix cache")
STEADY = tuple(
    Case(rule="sticky", agents=agents, by_turns=True, warm_s=60.0, measured_s=120.0) for agents in (FULL, TWICE)
)
CASES = (
    *STEADY,
    *(Case(rule="sticky", agents=agents, by_turns=True) for agents in (FITS, TWICE, FULL)),
    *(Case(rule=rule, agents=FITS) for rule in RULES),
    Case(rule="sticky", agents=TWICE),
)
SHORT = (
    Case(rule="round robin", agents=FITS),
    Case(rule="oracle", agents=FITS),
    *(Case(rule="sticky", agents=agents, by_turns=True) for agents in (FITS, TWICE)),
)
Figures = Mapping[str, Mapping[str, float]]


def claims(figures: Figures) -> list[outcome.Claim]:
    """Holds the figures against the goals."""
    sticky = figures[f"sticky by turns, {FITS} agents"]
    oracle, turns = figures[f"oracle, {FITS} agents"], figures[f"round robin, {FITS} agents"]
    # In the short form there are no others.
    long = {case.name: figures[case.name] for case in STEADY if case.name in figures} or figures
    peak = max(one["calls_per_s"] for name, one in long.items() if name.startswith("sticky by turns"))
    twice = next(one for name, one in long.items() if name.startswith(f"sticky by turns, {TWICE} agents"))
    failed = sum(one["failed_calls"] for one in figures.values())
    return [
        outcome.claim("hit rate / oracle's", sticky["hit_rate"] / oracle["hit_rate"], "", goal=0.95, better="higher"),
        outcome.claim("busiest / idlest engine", sticky["busiest_to_idlest"], "", goal=1.25, better="lower"),
        outcome.claim(
            "throughput / round robin's", sticky["calls_per_s"] / turns["calls_per_s"], "", goal=2, better="higher"
        ),
        outcome.claim(
            "throughput at twice the load / peak", twice["calls_per_s"] / peak, "", goal=0.95, better="higher"
        ),
        outcome.claim("failed calls", failed, "", goal=0, better="lower"),
    ]


def measure(case: Case) -> dict[str, float]:
    """Runs a case in a loop of its own."""
    figures = leaping_clock.run(run(case))
    sys.stdout.write(f"{case.name}: {figures}\n")
    sys.stdout.flush()
    return figures


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="four cases, half as long; writes nothing")
    parser.add_argument("--only", default="", help="the cases whose name has this; the results keep the others")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if options.short:
        short = [replace(one, warm_s=one.warm_s / 2, measured_s=one.measured_s / 2) for one in SHORT]
        outcome.show(None, claims({case.name: measure(case) for case in short}))
        return
    kept = outcome.FOLDER / "routing.json"
    figures = json.loads(kept.read_text(encoding="utf-8"))["raw"] if options.only and kept.exists() else {}
    for case in CASES:
        if options.only in case.name:
            figures[case.name] = measure(case)
    outcome.write("routing", method=__doc__ or "", raw=figures, claims=claims(figures))


if __name__ == "__main__":
    main()
