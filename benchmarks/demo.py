"""The demo: starts the local stack, trains the arithmetic example, stops the stack, and says what came of it.

    python -m benchmarks.demo                   # one training, as `make demo` does
    python -m benchmarks.demo --seeds 1 2 3     # one training for each seed, and a table
    python -m benchmarks.demo --check           # fails unless accuracy goes from at most 0.6 to at least 0.95

The last line is machine-readable, `validation accuracy 0.NN -> 0.NN` (with several seeds: of the one that ended worst).
The stack keeps its state in `.fulmen`; a second demo begins a new run on it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "arithmetic" / "train.toml"
UP_LIMIT_S = 300
TRAIN_LIMIT_S = 1800
DOWN_LIMIT_S = 300
HIGHEST_BEFORE = 0.6
LOWEST_AFTER = 0.95
FAILED = 1
UNFINISHED = frozenset({"PENDING", "RUNNING", "PAUSED"})


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training: its seed (None is the example's own), its accuracies, and how long it took in seconds."""

    seed: int | None
    before: float
    after: float
    seconds: float
    line: str

    @property
    def good(self) -> bool:
        """True if it learned as the demo claims."""
        return self.before <= HIGHEST_BEFORE and self.after >= LOWEST_AFTER


def fulmen(state_dir: Path, *arguments: str, limit_s: float, quiet: bool = False) -> None:
    """Runs a command on the terminal of the demo; its failure ends the demo, with the output that was held back."""
    command = [sys.executable, "-m", "fulmen_cli", *arguments, "--state-dir", str(state_dir)]
    done = subprocess.run(command, check=False, timeout=limit_s, capture_output=quiet, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.stderr.write(f"{done.stdout or ''}{done.stderr or ''}")
        raise SystemExit(done.returncode)


def train(state_dir: Path, config: Path, seed: int | None, extra: list[str]) -> Result:
    """Runs one training and reads its summary."""
    started = time.monotonic()
    stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    name = f"demo-{stamp}" if seed is None else f"demo-{stamp}-seed{seed}"
    report_dir = state_dir / "reports" / name
    seeded = [] if seed is None else ["--seed", str(seed)]
    fulmen(
        state_dir, "train", str(config), "--report-dir", str(report_dir), *seeded, *extra, limit_s=TRAIN_LIMIT_S
    )  # fmt: skip
    summary = json.loads((report_dir / "summary.json").read_text(encoding="utf-8"))
    results = summary["training_runs"][-1]["results"]
    return Result(
        seed=seed,
        before=results["validation_accuracy_before"],
        after=results["validation_accuracy_after"],
        seconds=time.monotonic() - started,
        line=summary["summary"],
    )


def stop_unfinished_runs(state_dir: Path) -> None:
    """Ends the runs of a demo that was broken off; they would go on with the next start and hold up the next demo."""
    listed = subprocess.run(
        [sys.executable, "-m", "fulmen_cli", "run", "list", "--output", "json", "--state-dir", str(state_dir)],
        check=False, timeout=DOWN_LIMIT_S, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    if listed.returncode != 0:
        return
    for run in json.loads(listed.stdout):
        if run["state"].removeprefix("TRAINING_RUN_STATE_") in UNFINISHED:
            fulmen(state_dir, "run", "stop", run["name"], limit_s=DOWN_LIMIT_S, quiet=True)


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[], help="one training for each; none: the example's own"
    )
    parser.add_argument("--state-dir", type=Path, default=ROOT / ".fulmen")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], help="handed on to `fulmen train`")
    parser.add_argument("--check", action="store_true", help="fail unless every training learned")
    given = parser.parse_args()
    extra = [word for assignment in given.set for word in ("--set", assignment)]
    started = time.monotonic()
    fulmen(given.state_dir, "up", limit_s=UP_LIMIT_S)
    up_s = time.monotonic() - started
    try:
        results = [train(given.state_dir, given.config, seed, extra) for seed in given.seeds or [None]]
    except (SystemExit, KeyboardInterrupt):
        stop_unfinished_runs(given.state_dir)
        raise
    finally:
        stopping = time.monotonic()
        fulmen(given.state_dir, "down", limit_s=DOWN_LIMIT_S, quiet=True)
    total_s, down_s = time.monotonic() - started, time.monotonic() - stopping
    for result in results if len(results) > 1 else []:
        sys.stdout.write(f"seed {result.seed}: {result.before:.2f} -> {result.after:.2f} in {result.seconds:.0f} s\n")
    training_s = sum(result.seconds for result in results)
    sys.stdout.write(f"start {up_s:.0f} s, training {training_s:.0f} s, stop {down_s:.0f} s, total {total_s:.0f} s\n")
    sys.stdout.write(min(results, key=lambda result: result.after).line + "\n")
    if given.check and not all(result.good for result in results):
        sys.stderr.write(f"a training did not go from <= {HIGHEST_BEFORE} to >= {LOWEST_AFTER}\n")
        raise SystemExit(FAILED)


if __name__ == "__main__":
    main()
