"""Benchmark of the runner: attempts per second, memory of many attempts at once, imports, and a peer beside it.

Method: a real runner process over a real store over an embedded PostgreSQL (fsync and synchronous_commit on), all on one
machine. The agents are those of agents.py, run unchanged by both sides. Ratios and CPU per attempt hold on a busy
machine, rates do not. Run `python -m benchmarks.runner [--short] [--only PART ...]`; writes
benchmarks/results/runner.json and runner.png.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import uvloop

from benchmarks import outcome
from benchmarks.runner import density, imports, isolation, peers, picture, throughput
from benchmarks.runner.stand import Bench, standing

PARTS = {
    "throughput": throughput.run,
    "density": density.run,
    "imports": imports.run,
    "isolation": isolation.run,
    "peers": peers.run,
}


async def measure(folder: Path, *, short: bool, parts: list[str]) -> Bench:
    """Runs the parts one after the other."""
    async with standing(folder, short=short) as bench:
        for part in parts:
            await PARTS[part](bench)
    return bench


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description="Measures the runner.")
    parser.add_argument(
        "--short", action="store_true", default=bool(os.environ.get("SHORT")), help="two minutes instead of six"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="only these parts; nothing is written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        Path(folder).chmod(0o755)
        bench = uvloop.run(measure(Path(folder), short=arguments.short, parts=arguments.only or list(PARTS)))
    if arguments.only:
        outcome.show(bench.raw, bench.claims)
    else:
        outcome.write("runner", method=__doc__ or "", raw=bench.raw, claims=bench.claims)
        picture.draw(bench.raw, outcome.FOLDER / "runner.png")


if __name__ == "__main__":
    main()
