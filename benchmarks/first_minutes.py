"""What a new user waits for: the start of the stack, the first training, and the next one after a change of the agent.

Method: `fulmen init`, `fulmen up` and `fulmen train`, with their defaults, in a new folder; then for each edit a line is added to the
agent, and `fulmen train` runs again on the same stack. A training of the template imitates first (`sft`, which reports every tenth
step), then learns from rewards (`grpo`). Seconds are from the start of the command to the event of a stage's first step, as
`fulmen train --output json` prints it; CPU seconds are those of the command and of all processes of the stack, its database and
what has ended included, in that time. Run it on an idle machine; the load that was found there stands beside the figures. On one that
others keep busy, only CPU seconds say anything of Fulmen: were nothing done at the same time, an idle processor would take as long.

    python -m benchmarks.first_minutes                  # three edits
    python -m benchmarks.first_minutes --edits 1

Writes first_minutes.json to --output, by default benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import outcome
from benchmarks.demo import DOWN_LIMIT_S, TRAIN_LIMIT_S, UP_LIMIT_S
from benchmarks.proxy.processes import tree
from benchmarks.store.stand import postgres_pids
from fulmen_cli.local.record import DEFAULT_STATE_DIR, StackFolder

FULMEN = (sys.executable, "-m", "fulmen_cli")
INIT_LIMIT_S = 60
GOAL_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Wall and CPU time since a moment, in seconds."""

    wall_s: float
    cpu_s: float


class Meter:
    """Measures from its making on."""

    def __init__(self, *commands: int, stack: StackFolder | None = None) -> None:
        """Begins; `commands` are the ids of processes that have just been started, `stack` is one that runs."""
        self._commands = commands
        self._stack = stack
        self._began = time.monotonic()
        self._cpu_before_s = self._stack_cpu_s()

    def read(self) -> Spent:
        """Returns what has been spent."""
        cpu_s = sum(map(_cpu_s, self._commands)) + self._stack_cpu_s() - self._cpu_before_s
        return Spent(wall_s=round(time.monotonic() - self._began, 2), cpu_s=round(cpu_s, 2))

    def _stack_cpu_s(self) -> float:
        record = self._stack.read() if self._stack is not None else None
        if record is None or self._stack is None:
            return 0.0
        return sum(map(_cpu_s, (*tree(record.keeper_pid), *postgres_pids(self._stack.database))))


def _cpu_s(pid: int) -> float:
    """Returns the CPU time of a process and of its children that have ended; 0 if it has ended itself."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


@contextmanager
def started(folder: Path, *words: str, limit_s: float) -> Iterator[subprocess.Popen[str]]:
    """Starts `fulmen`, and checks in the end that it ended well."""
    with subprocess.Popen([*FULMEN, *words], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
    if process.returncode:
        raise SystemExit(f"fulmen {' '.join(words)}: exit status {process.returncode}")


def run(folder: Path, *words: str, limit_s: float) -> float:
    """Runs `fulmen` to its end; returns the seconds."""
    began = time.monotonic()
    with started(folder, *words, limit_s=limit_s) as process:
        process.communicate()
    return round(time.monotonic() - began, 2)


def train(folder: Path) -> dict[str, Any]:
    """Trains once; returns when each stage took its first step, what was said on the way, and the whole."""
    load = os.getloadavg()[0]
    stage, first, said = "", dict[str, Any](), list[tuple[float, str]]()
    with started(folder, "train", "train.toml", "--output", "json", limit_s=TRAIN_LIMIT_S) as process:
        meter = Meter(process.pid, stack=StackFolder(folder / DEFAULT_STATE_DIR))
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if "run" in event:
                stage = event["run"]["algorithm"]
                said.append((meter.read().wall_s, f"{stage}: {event['run']['state'].rpartition('_')[2].lower()}"))
            elif "notice" in event:
                said.append((meter.read().wall_s, f"{stage}: {event['notice']['message']}"))
            elif int(event.get("step", {}).get("step", 0)) and stage not in first:
                spent = meter.read()
                first[stage] = {"wall_s": spent.wall_s, "cpu_s": spent.cpu_s}
                said.append((spent.wall_s, f"{stage}: step {event['step']['step']}"))
        spent = meter.read()
    return {
        "first_step": first,
        "whole": {"wall_s": spent.wall_s, "cpu_s": spent.cpu_s},
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "said": said,
    }


def measure(folder: Path, edits: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the first training, with the seconds of the start, and those after each edit."""
    run(folder, "init", limit_s=INIT_LIMIT_S)
    up_s = run(folder, "up", limit_s=UP_LIMIT_S)
    try:
        first = {"up_s": up_s, **train(folder)}
        show("first", first)
        after = []
        for number in range(1, edits + 1):
            with (folder / "agent.py").open("a") as agent:
                agent.write(f"# edit {number}\n")
            after.append(train(folder))
            show(f"edit {number}", after[-1])
    finally:
        run(folder, "down", limit_s=DOWN_LIMIT_S)
    return first, after


def show(name: str, training: dict[str, Any]) -> None:
    """Prints a training: what was said until each stage's first step, in wall seconds."""
    for at_s, text in training["said"]:
        sys.stdout.write(f"{name}  {at_s:6.2f} s  {text}\n")
    for stage, spent in training["first_step"].items():
        sys.stdout.write(f"{name}: {stage} steps after {spent['wall_s']} s, {spent['cpu_s']} CPU s\n")
    sys.stdout.write(f"{name}: whole {training['whole']}, load {training['load']}\n")
    sys.stdout.flush()


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=3, help="trainings after a change of the agent")
    parser.add_argument("--output", type=Path, default=outcome.FOLDER, help="folder for first_minutes.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fulmen-first-") as place:
        first, after = measure(Path(place), given.edits)
    stage = next(iter(first["first_step"]))
    waits = [each["first_step"][stage] for each in after]
    claims = [
        outcome.claim(
            f"fulmen train after an edit, to the first trained step, {kind}, median",
            statistics.median(each[key] for each in waits), unit, goal=GOAL_S, better="lower",
        )
        for kind, key, unit in (("waited", "wall_s", "s"), ("CPU of all processes", "cpu_s", "CPU s"))
    ]  # fmt: skip
    outcome.save(
        "first_minutes",
        method=__doc__ or "",
        raw={"first": first, "after_edits": after},
        claims=claims,
        folder=given.output,
    )
    outcome.show(None, claims)


if __name__ == "__main__":
    main()
