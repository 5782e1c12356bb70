"""Scaling curve: rollouts and tokens per second against 1 to 8 engines, beside what the model of a deployment says.

Method: the agents, the engines and the clock of `benchmarks.routing`: simulated engines with the cache and the scheduler of vLLM and the
timings of Llama 3.1 8B on an H100, behind the whole proxy, on a clock that stands still while anything computes. What is
measured is what routing, seats and caches make of several engines; processor time, networks and GPUs are not. One engine alone is measured
with several numbers of agents, and a straight line through its times is all that the model (`benchmarks/scale/model.py`) knows of
it; what it says of more engines is computed from that. With a trainer, rollouts are at most four steps ahead of it, and each step
of 64 rollouts ends with new weights, for which every engine stands still for a second and loses its cache. Agents begin in the middle of
an attempt, engines begin empty; 20 s pass before 90 s count, 60 s before 180 s with a trainer. Seed 1.

Run `python -m benchmarks.machines.curve [--short]`; writes benchmarks/results/machines_curve.json and docs/images/machines-curve.png.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog

from benchmarks import outcome
from benchmarks.machines import picture, points
from benchmarks.machines.points import Load
from benchmarks.routing.load import Case, run
from tests.support import leaping_clock

MOST_OFF_PERCENT = 10.0
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "machines-curve.png"
SHORT = (1, 2, 4)


def measure(case: Case, *, short: bool) -> dict[str, float]:
    """Runs a case in a loop of its own; adds rollouts per second and the processor time of the whole process for a call."""
    if short:
        case = replace(case, warm_s=case.warm_s / 4, measured_s=case.measured_s / 4)
    began_s = time.process_time()
    figures = leaping_clock.run(run(case))
    calls = figures["calls"] * (case.warm_s + case.measured_s) / case.measured_s
    figures["rollouts_per_s"] = round(figures["attempts_ended"] / case.measured_s, 3)
    figures["cpu_ms_per_call"] = round((time.process_time() - began_s) / calls * 1e3, 2)
    return figures


def curve(*, short: bool) -> dict[str, Any]:
    """Measures the engines alone and then every point; returns the raw figures."""
    alone, speeds = {}, {}
    for kind, (timings, numbers) in points.KINDS.items():
        found = {agents: measure(points.alone(timings, agents), short=short) for agents in numbers}
        alone[kind], speeds[kind] = found, points.speed(timings, found)
        sys.stdout.write(f"{kind}: {speeds[kind]}\n")
    training = points.trainer(alone["one GPU"][points.FITS])
    loads: dict[str, list[dict[str, Any]]] = {}
    for load in points.LOADS:
        loads[load.name] = []
        for number in load.engines:
            if short and number not in SHORT:
                continue
            case = load.case(number, training)
            row = points.row(number, case.agents, measure(case, short=short), points.told(case, speeds["one GPU"]))
            loads[load.name].append(row)
            sys.stdout.write(line(load, row))
            sys.stdout.flush()
    return {
        "speeds": {kind: asdict(each) for kind, each in speeds.items()},
        "training": asdict(training),
        "alone": alone,
        "loads": loads,
    }


def line(load: Load, found: Mapping[str, Any]) -> str:
    """Returns a row of the table."""
    measured = found["measured"]
    return (
        f"| {load.name} | {found['engines']} | {measured['rollouts_per_s']:.2f} | {measured['answer_tokens_per_s']:,.0f}"
        f" | {found['model']['tokens_per_s']:,.0f} | {found['model_off_percent']:+.1f} % | {measured['hit_rate']:.1%}"
        f" | {measured['first_token_p99_s']:.2f} s | {found['bound_by']} |\n"
    )


def claims(raw: Mapping[str, Any]) -> list[outcome.Claim]:
    """Holds the figures against the goals."""
    every = [one for rows in raw["loads"].values() for one in rows]
    full = raw["loads"][points.LOADS[1].name]
    first, last = full[0], full[-1]
    share = last["measured"]["answer_tokens_per_s"] / (last["engines"] * first["measured"]["answer_tokens_per_s"])
    off = max(abs(one["model_off_percent"]) for one in every)
    uneven = max(one["measured"]["busiest_to_idlest"] for one in full)
    failed = sum(one["measured"]["failed_calls"] for one in every)
    return [
        outcome.claim("tokens of all engines / of as many single ones", share, "", goal=0.95, better="higher"),
        outcome.claim("model against the curve, largest error", off, "%", goal=MOST_OFF_PERCENT, better="lower"),
        outcome.claim("busiest / idlest engine", uneven, "", goal=1.25, better="lower"),
        outcome.claim("failed calls", failed, "", goal=0, better="lower"),
    ]


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="1, 2 and 4 engines, for a quarter of the time; writes nothing"
    )
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    raw = curve(short=options.short)
    if options.short:
        outcome.show(None, claims(raw))
        return
    outcome.write("machines_curve", method=__doc__ or "", raw=raw, claims=claims(raw))
    picture.draw(raw, PICTURE)


if __name__ == "__main__":
    main()
