"""Benchmark of what people wait for first: `import fulmen` and `fulmen --help`, each in a fresh process, the best of ten.

Seconds are those of a clock, so they hold on an idle machine only; memory is what is resident in the end. Run
`python -m benchmarks.cli`; writes benchmarks/results/cli.json.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks import outcome
from benchmarks.runner.imports import IMPORT

TRIES = 10
PROGRAM = Path(sys.executable).parent / "fulmen"


def elapsed_s(command: list[str]) -> float:
    """Returns how long a command takes, in seconds."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return time.perf_counter() - begun


def main() -> None:
    """Measures, and writes the results."""
    nothing = [elapsed_s([sys.executable, "-c", ""]) for _ in range(TRIES)]
    named = [elapsed_s([sys.executable, "-c", "import fulmen"]) for _ in range(TRIES)]
    helped = [elapsed_s([str(PROGRAM), "--help"]) for _ in range(TRIES)]
    program = [sys.executable, "-c", IMPORT.format(modules="fulmen")]
    sizes = [
        float(subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout.split()[1])
        for _ in range(TRIES)
    ]
    outcome.write(
        "cli",
        method=__doc__ or "",
        raw={
            "python alone, s": nothing,
            "import fulmen, s": named,
            "fulmen --help, s": helped,
            "import fulmen, MB": sizes,
        },
        claims=[
            outcome.claim(
                "import fulmen, beyond Python's own start", min(named) - min(nothing), "s", goal=0.15, better="lower"
            ),
            outcome.claim("import fulmen, memory", min(sizes), "MB", goal=40, better="lower"),
            outcome.claim("fulmen --help", min(helped), "s", goal=0.3, better="lower"),
        ],
    )


if __name__ == "__main__":
    main()
