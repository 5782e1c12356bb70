"""Benchmarks of training that are programs of their own: the trainer alone, publishing a version, and writing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.train.stand import ROOT

LIMIT_S = 1200
PACKED, PADDED = "1 process, packed", "1 process, padded"
LOSS_TOLERANCE = 1e-4
"""How far the first loss of a group of ranks may be from that of one process, as a share of it."""
PACKING_GOAL = 0.9


def trainer(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Measures the trainer alone: tokens per second, memory, packing, and groups of ranks."""
    shorter = ("--steps", "1", "--layers", "2", "--hidden", "256")
    raw = _metrics("trainer", *(shorter if short else ("--steps", "5")))
    cases: Mapping[str, Mapping[str, float]] = raw["cases"]
    packed, padded = cases[PACKED], cases[PADDED]
    loss = packed["first_loss"]
    apart = max(abs(case["first_loss"] - loss) / abs(loss) for case in cases.values())
    faster = padded["tokens_per_cpu_second"]
    claims = [
        outcome.claim(
            "packing efficiency, rows of 12 to 336 tokens", packed["packing_efficiency"], "share", goal=PACKING_GOAL, better="higher"
        ),
        outcome.claim(
            "tokens per CPU second, packed over padded", packed["tokens_per_cpu_second"] / faster, "times", goal=1, better="higher"
        ),
        outcome.claim(
            "loss of any layout or group of ranks, apart from one process's", apart, "share", goal=LOSS_TOLERANCE, better="lower"
        ),
    ]  # fmt: skip
    return raw, claims


def publish(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Measures what publishing a version costs."""
    raw = _metrics("publish", *(("--short",) if short else ()))
    return raw, raw.pop("claims")


def behind(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Measures how long the trainer waits for a version and a checkpoint."""
    raw = _metrics("behind", *(("--short",) if short else ()))
    return raw, raw.pop("claims")


def _metrics(name: str, *words: str) -> dict[str, Any]:
    """Runs a benchmark in a process of its own; returns its metrics."""
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        file = Path(folder) / "metrics.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(file), *words]
        subprocess.run(command, check=True, timeout=LIMIT_S, cwd=ROOT)
        metrics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return metrics
