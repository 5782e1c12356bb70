"""Benchmark of the store: durable rollout cycles, dispatch latency, spans, a large backlog, the feed, days kept, lists,
and peers.

Method: a real store process over an embedded PostgreSQL (fsync and synchronous_commit on); this process is the load
generator, all on one machine. Every rollout is created, committed, pushed over a lease stream, completed, committed
and acknowledged. The peers run in the same run. Ratios and CPU per operation hold on a busy machine, rates do not.
Run `python -m benchmarks.store [--short] [--only PART ...] [--days N] [--ends N]`; writes benchmarks/results/store.json
and store.png.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks import outcome
from benchmarks.store import backlog, days, feed, lists, picture, rollouts, spans
from benchmarks.store.peers import lightning
from benchmarks.store.stand import Bench, running_store

PARTS = {
    "rollouts": rollouts.run, "spans": spans.run, "peers": lightning.run, "backlog": backlog.run, "feed": feed.run,
    "days": days.run, "lists": lists.run,
}  # fmt: skip
# CPU, which other work on the machine does not change; and what is resident now: the peak that getrusage knows is
# inherited from the parent on Linux.
IMPORT = """
import resource, sys, time
started = time.process_time()
import fulmen_store.app
spent_s = time.process_time() - started
if sys.platform == "linux":
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
else:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(spent_s, resident / 1e6)
"""


def measure_import(bench: Bench) -> None:
    """Measures what it costs to import the service, in a fresh process; the best of five."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True) for _ in range(5)
    ]
    figures = [tuple(map(float, run.stdout.split())) for run in runs]
    bench.claim("import of the service, CPU", min(figure[0] for figure in figures), "s", 0.5, "lower")
    bench.claim("import of the service, memory", min(figure[1] for figure in figures), "MB", 60, "lower")


def _made(folder: Path) -> Path:
    """Makes a folder that PostgreSQL's own user may pass through."""
    folder.mkdir()
    folder.chmod(0o755)
    return folder


async def measure(folder: Path, arguments: argparse.Namespace) -> Bench:
    """Runs the parts one after the other against one store."""
    short, parts = arguments.short, arguments.only or [*PARTS, "replicas"]
    async with running_store(_made(folder / "one"), short=short) as bench:
        bench.days = arguments.days
        bench.rows_per_day = arguments.rows_per_day or (10 if short else 100)
        bench.ends = arguments.ends
        for part in parts:
            if part in PARTS:
                await PARTS[part](bench)
    if "replicas" in parts:
        async with running_store(_made(folder / "two"), short=short, replicas=2) as pair:
            await rollouts.throughput(pair)
        bench.raw |= pair.raw
        bench.claims += pair.claims
    measure_import(bench)
    return bench


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description="Measures the store.")
    parser.add_argument(
        "--short", action="store_true", default=bool(os.environ.get("SHORT")), help="four minutes instead of twenty"
    )
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "replicas"], help="only these parts; nothing is written")
    parser.add_argument("--days", type=int, default=1000, help="days that the part `days` keeps")
    parser.add_argument("--rows-per-day", type=int, help="rollouts of each; 100 by default, 10 in the short form")
    parser.add_argument("--ends", type=int, default=0, help="ends of another run beside which the feed is measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        Path(folder).chmod(0o755)
        bench = uvloop.run(measure(Path(folder), arguments))
    if arguments.only:
        outcome.show(bench.raw, bench.claims)
    else:
        outcome.write("store", method=__doc__ or "", raw=bench.raw, claims=bench.claims)
        picture.draw(bench.raw, outcome.FOLDER / "store.png")


if __name__ == "__main__":
    main()
