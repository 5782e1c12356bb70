"""The console in a real browser: size, first paint, live updates, long lists and traces.

A stack of all services runs on this machine, and Chromium (headless, without a cache) on the same cores, so figures include what
both take from each other. Run `python -m benchmarks.console [--short]`; writes benchmarks/results/console.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import outcome

ROOT = Path(__file__).parents[2]
LIMIT_S = 3600
SECONDS, SHORT_SECONDS = 600, 30
ROWS, SHORT_ROWS = 100_000, 5_000
SCRIPT_BYTES = 250_000
METHOD = """
Chromium, headless, 1440 x 900, beside the stack on the same machine. First page: Home, with an empty cache; bytes of scripts as sent
(gzip). Live: ten changes of rollouts a second (five created, five cancelled) on the page of rollouts; heaps after a forced
collection, the first after 60 s of changes, when the list has the 200 new rows that it keeps; long tasks are those over 50 ms. Commit:
from the answer of a creation until the rollout is on the page. Scroll: 300 jumps of 400 pixels through the rows that are loaded; script
time per jump. Trace: 10,000 spans; from navigation until the frame of the first row, by the page's own clock; then, with all spans, 60
pages and 20 zooms.
"""


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_SECONDS} s of updates and {SHORT_ROWS} rows")
    short = parser.parse_args().short
    found = measured(SHORT_SECONDS if short else SECONDS, SHORT_ROWS if short else ROWS)
    claims = claims_of(found)
    if short:
        outcome.show(found, claims)
    else:
        outcome.write("console", method=METHOD, raw=found, claims=claims)


def measured(seconds: int, rows: int) -> dict[str, Any]:
    """Starts a stack, measures, and stops it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.browser_stack"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as stack:  # fmt: skip
        assert stack.stdout is not None
        ready = json.loads(next(line for line in stack.stdout if line.startswith("{")))
        made = _run(sys.executable, "-m", "tests.support.browser_rollouts", ready["folder"])
        asked = ready | {"large": made["large"], "seconds": seconds, "rows": rows}
        found = _run("node", "benchmarks/console/measure.mjs", json.dumps(asked))
        stack.communicate()
    return found


def _run(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def claims_of(found: dict[str, Any]) -> list[outcome.Claim]:
    """Returns the claims with their goals."""
    first, live, scroll, trace = (found[name] for name in ("first_page", "live", "scroll", "trace"))
    growth = live["heap_after"] / live["heap_before"] - 1
    rows = (
        ("scripts of the first page, gzip", first["script_bytes"] / 1000, "kB", SCRIPT_BYTES / 1000),
        ("first paint", first["first_paint_ms"] / 1000, "s", 1),
        ("long tasks during live updates", live["long_tasks"], "tasks", 5),
        ("growth of the heap", growth * 100, "%", 10),
        ("from commit to screen, p95", live["commit"]["p95_ms"] / 1000, "s", 1),
        ("script time of a jump in a long list, p95", scroll["script_ms_p95"], "ms", 8),
        ("first view of 10,000 spans", trace["first_view_ms"] / 1000, "s", 1),
        ("long tasks while scrolling and zooming spans", trace["long_tasks"], "tasks", 0),
    )
    return [outcome.claim(name, value, unit, goal=goal, better="lower") for name, value, unit, goal in rows]


if __name__ == "__main__":
    main()
