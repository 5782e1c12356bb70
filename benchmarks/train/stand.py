"""The local stack of `fulmen up`, and trainings on it through the commands that people type."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STATE_DIR = ROOT / ".fulmen" / "bench"
UP_LIMIT_S = 300.0
TRAIN_LIMIT_S = 1800.0
DOWN_LIMIT_S = 300.0
READ_LIMIT_S = 60.0
LINE_CHARACTERS = 160


class CommandFailed(Exception):
    """A command ended badly; the text is the end of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a training step reported.

    Attributes:
        step: Training steps done.
        at_s: Seconds since the run began.
        values: Its metrics.
    """

    step: int
    at_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One training run of a training."""

    name: str
    algorithm: str
    model_path: str
    results: Mapping[str, float]
    steps: Sequence[Step]
    seconds: float

    @property
    def spent_s(self) -> dict[str, float]:
        """Wall time by what it was spent on."""
        found: dict[str, float] = {}
        for step in self.steps:
            for key, value in step.values.items():
                if key.startswith("spent_"):
                    found[key.removeprefix("spent_").removesuffix("_seconds")] = value
        return found

    def curve(self) -> list[tuple[float, float]]:
        """Returns seconds and validation accuracy of every validation."""
        return [(s.at_s, s.values["validation_accuracy"]) for s in self.steps if "validation_accuracy" in s.values]

    def mean(self, metric: str) -> float:
        """Averages a metric over the steps that report it; 0 if none does."""
        found = [step.values[metric] for step in self.steps if metric in step.values]
        return sum(found) / len(found) if found else 0.0


class Stand:
    """A running stack."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    def train(self, config: Path, name: str, *options: str) -> list[Stage]:
        """Runs `fulmen train` to its end; returns its stages.

        Raises:
            CommandFailed: if it ends badly.
        """
        folder = self._state_dir / "reports" / name
        shutil.rmtree(folder, ignore_errors=True)
        words = ("train", str(config), "--report-dir", str(folder), *options)
        command(*words, "--state-dir", str(self._state_dir), limit_s=TRAIN_LIMIT_S, prefix=f"{name}: ")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return [self._stage(run) for run in summary["training_runs"]]

    def _stage(self, run: Mapping[str, Any]) -> Stage:
        lines = self._run("run", "watch", run["name"], "--output", "json", limit_s=READ_LIMIT_S).splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        running = [event for event in events if event.get("run", {}).get("state", "").endswith("RUNNING")]
        began, ended = _seconds(running[0]["event_time"]), _seconds(events[-1]["event_time"])
        steps = [
            Step(
                step=int(event["step"].get("step", 0)),
                at_s=_seconds(event["event_time"]) - began,
                values=event["step"]["values"],
            )
            for event in events
            if "step" in event
        ]
        return Stage(
            name=run["name"],
            algorithm=run["algorithm"],
            model_path=run["model_path"],
            results=run["results"],
            steps=steps,
            seconds=ended - began,
        )

    def _run(self, *arguments: str, limit_s: float) -> str:
        return command(*arguments, "--state-dir", str(self._state_dir), limit_s=limit_s)


def command(*arguments: str, limit_s: float, prefix: str | None = None) -> str:
    """Runs `fulmen`; returns what it printed, and says each line at once if it has a prefix.

    Raises:
        CommandFailed: if it ends badly, or not within the limit.
    """
    words = [sys.executable, "-m", "fulmen_cli", *arguments]
    lines = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        try:
            for line in process.stdout:
                lines.append(line)
                if prefix is not None and line.strip():
                    say(prefix + line.rstrip()[:LINE_CHARACTERS])
            process.wait()
        finally:
            limit.cancel()
            process.kill()
    if process.returncode:
        raise CommandFailed(f"fulmen {' '.join(arguments)}: {''.join(lines)[-2000:]}")
    return "".join(lines)


@contextmanager
def standing(*options: str, state_dir: Path = STATE_DIR) -> Iterator[Stand]:
    """Starts the stack afresh, and stops it; `options` are those of `fulmen up`."""
    if state_dir.exists():
        subprocess.run(
            [sys.executable, "-m", "fulmen_cli", "down", "--state-dir", str(state_dir)],
            check=False, timeout=DOWN_LIMIT_S, capture_output=True, cwd=ROOT,
        )  # fmt: skip
        shutil.rmtree(state_dir)
    command("up", "--state-dir", str(state_dir), *options, limit_s=UP_LIMIT_S)
    try:
        yield Stand(state_dir)
    finally:
        command("down", "--state-dir", str(state_dir), limit_s=DOWN_LIMIT_S)


def say(text: str) -> None:
    """Prints a line at once: a benchmark of minutes must not look dead."""
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
