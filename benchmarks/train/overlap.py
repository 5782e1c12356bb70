"""Asynchronous against synchronous training, one after the other, from the same weights on the same stack.

The agents take an uneven time (`uneven_agent.py`). A synchronous step waits for its slowest task, and generates nothing
while it trains; an asynchronous one trains on what is there, with rollouts at most four steps old. Measured is the
time from the validation of the first weights to the first validation that reaches a given accuracy.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.train import configs, learning
from benchmarks.train.stand import Stage, standing

SLOTS = 256
SEED = 1
EXAMPLE = "arithmetic"
TARGET = 0.9
STEPS = 60
VALIDATE_EVERY = 6
# Training waits for a validation, on both sides: of two hundred tasks it would take as long as six asynchronous steps.
VALIDATION_TASKS = 100
ASYNCHRONOUS = 4
# With the example's own rate ten steps are enough, which are too few to be measured; a slow one takes tens of them.
SLOWLY = {"prompts_per_step": 16, "learning_rate": 2e-5, "schedule": "constant"}
GOAL = 2.0
AGENT = Path(__file__).with_name("uneven_agent.py")


def run(*, short: bool, seed: int = SEED) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Measures; the short form ends earlier, at a lower target."""
    steps, target = (24, 0.8) if short else (STEPS, TARGET)
    report = partial(learning.say_now_and_then, f"overlap: imitation {EXAMPLE}-{seed}")
    weights = asyncio.run(learning.imitated(learning.example(EXAMPLE, seed=seed), cache=learning.CACHE, report=report))
    _, grpo = configs.stages_of(EXAMPLE)
    found: dict[str, Stage] = {}
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder, standing("--slots", str(SLOTS)) as stand:
        path = Path(folder)
        for name, staleness in (("synchronous", 0), ("asynchronous", ASYNCHRONOUS)):
            settings = {**grpo.settings, **SLOWLY, "seed": seed, "steps": steps, "validate_every": VALIDATE_EVERY}
            stage = replace(grpo, settings={**settings, "max_staleness": staleness})
            config = configs.write(path / name, EXAMPLE, [stage], weights=str(weights), agent=AGENT)
            validation = config.parent / "tasks" / "validation.jsonl"
            validation.write_text("".join(validation.read_text().splitlines(keepends=True)[:VALIDATION_TASKS]))
            found[name] = stand.train(config, name)[0]
    return _metrics(found, target)


def _metrics(found: Mapping[str, Stage], target: float) -> tuple[dict[str, Any], list[outcome.Claim]]:
    times = {name: reached(stage, target) for name, stage in found.items()}
    raw = {
        "target_validation_accuracy": target,
        **{name: {"reached_s": times[name], **_shown(stage)} for name, stage in found.items()},
    }
    synchronous, asynchronous = times["synchronous"], times["asynchronous"]
    name = f"asynchronous reaches {target:g} sooner than synchronous, {EXAMPLE} with uneven agents"
    if synchronous is None:
        name += ", which did not (at least)"
        (began, _), *_, (synchronous, _) = found["synchronous"].curve()
        synchronous -= began
    if asynchronous is None:
        name += "; it did not"
    times_sooner = synchronous / asynchronous if asynchronous else 0.0
    return raw, [outcome.claim(name, times_sooner, "times", goal=GOAL, better="higher")]


def reached(stage: Stage, target: float) -> float | None:
    """Returns the seconds from the first validation to the first that reaches the target; None if none did."""
    (began, _), *later = stage.curve()
    return next((round(at_s - began, 1) for at_s, accuracy in later if accuracy >= target), None)


def _shown(stage: Stage) -> dict[str, Any]:
    return {
        "seconds": round(stage.seconds, 1),
        "curve": [(round(at_s, 1), accuracy) for at_s, accuracy in stage.curve()],
        "spent_s": {kind: round(seconds, 1) for kind, seconds in stage.spent_s.items()},
        "staleness_mean": round(stage.mean("staleness_mean"), 2),
        "rows_stale": round(stage.mean("rows_stale"), 1),
        "rollouts_per_second": round(stage.mean("rollouts_per_second"), 1),
    }
