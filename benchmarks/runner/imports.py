"""What it costs to import the SDK and the runner, each in a fresh process; the best of five."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from benchmarks.runner.stand import Bench

MODULES = {
    "the SDK's name (import fulmen)": ("fulmen", 0.15, 40),
    "the SDK (fulmen, its emitters and its client)": (
        "fulmen, fulmen.agent, fulmen.emit, fulmen.rpc.services",
        0.3,
        60,
    ),
    "the runner": ("fulmen_runner.app", 1.0, 100),
}
# CPU, which other work on the machine does not change; and what is resident now.
IMPORT = """
import os, resource, sys, time
started = time.process_time()
import {modules}
spent_s = time.process_time() - started
if sys.platform == "linux":
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
else:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(spent_s, resident / 1e6)
"""


async def run(bench: Bench) -> None:
    """Measures each."""
    for title, (modules, seconds, megabytes) in MODULES.items():
        figures = await asyncio.to_thread(_measured, modules)
        bench.raw[f"import of {title}"] = {"cpu_s": [one[0] for one in figures], "mb": [one[1] for one in figures]}
        bench.claim(f"import of {title}, CPU", min(one[0] for one in figures), "s", seconds, "lower")
        bench.claim(f"import of {title}, memory", min(one[1] for one in figures), "MB", megabytes, "lower")


def _measured(modules: str) -> list[tuple[float, ...]]:
    command = [sys.executable, "-c", IMPORT.format(modules=modules)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, timeout=60) for _ in range(5)]
    return [tuple(map(float, run.stdout.split())) for run in runs]
