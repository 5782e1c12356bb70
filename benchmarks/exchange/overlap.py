"""Benchmark of sums that overlap with the backward pass, beside the same hook that begins after it.

Method: that of `benchmarks.exchange` (its processes, lines, model, and turns), with the package's codecs in the communication
hook of PyTorch's DDP: once with `overlap`, once without. A step's time is that of the slowest rank; medians and quartiles.

Run `python -m benchmarks.exchange.overlap [--only LINE ...] [--ranks N ...] [--trials N] [--contenders NAME ...] [--out FILE]`; writes JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import outcome
from benchmarks.exchange.contenders import HOOKED
from benchmarks.exchange.lines import LINES, Line, enter
from benchmarks.exchange.measure import Form, Taken, Turns
from benchmarks.exchange.stand import Stand, say

OUT = outcome.FOLDER / "exchange_overlap.json"


def main(arguments: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.exchange.overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=LINES, default=["loopback", "1gbit", "100mbit"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--trials", type=int, default=5, help="turns that count")
    parser.add_argument("--contenders", nargs="+", choices=HOOKED, default=list(HOOKED), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    enter("benchmarks.exchange.overlap", arguments)
    raw: dict[str, Any] = {}
    for name in given.only:
        for ranks in given.ranks:
            raw.setdefault(name, {})[str(ranks)] = found = _measured(LINES[name], ranks, given.trials, given.contenders)
            for contender, figures in found.items():
                say(f"{name}, {ranks} ranks, {contender}: {figures}")
            outcome.save(given.out.stem, method=__doc__ or "", raw=raw, claims=[], folder=given.out.parent)
    say(f"load at the end: {os.getloadavg()}")
    return 0


def _measured(line: Line, ranks: int, trials: int, names: Sequence[str]) -> dict[str, Any]:
    contenders = [HOOKED[name] for name in names]
    form = Form(worlds=(ranks,), trials=trials, steps=3)
    with Stand(line, ranks) as stand:
        turns = Turns(stand, line, ranks, form)
        turns.warm_up(contenders)
        stand.shape()
        turns.all(contenders)
        return {name: _figures(taken) for name, taken in turns.taken.items()}


def _figures(taken: Taken) -> Mapping[str, Any]:
    seconds = [step["step_s"] for step in taken.steps]
    low, _, high = quantiles(seconds, n=4)
    return {
        "step_s": round(median(seconds), 4),
        "quartiles_s": [round(low, 4), round(high, 4)],
        "steps": len(seconds),
        "cpu_s": round(median(turn["cpu_s"] for turn in taken.turns), 3),
        "sent_mb": round(median(turn["sent_bytes"] for turn in taken.turns) / 1e6, 3),
        "alike": all(len(set(digests)) == 1 for digests in taken.digests),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
