"""GRPO on the arithmetic example, with ranks in processes of their own that exchange over a process group.

The algorithm, the trainer, the settings and the sampling code are those of the service; only transport is missing
(`benchmarks.train.world`). All cells of a seed begin with the same weights, those after imitation.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import perf_counter

from benchmarks.exchange.convergence.cases import Cell, Learned, switches
from benchmarks.train import learning
from fulmen_algorithm.runs.entry import EventLog
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec

EXAMPLE = "arithmetic"
LAST = 10
"""Training steps whose mean reward is what a run has come to: with 256 rollouts each it has less noise than 200 tasks."""


def train(cell: Cell) -> Learned:
    """Trains a cell; only time is counted that it takes after imitation."""
    return asyncio.run(_train(cell))


async def _train(cell: Cell) -> Learned:
    config = learning.example(EXAMPLE, seed=cell.seed)
    weights = await learning.imitated(config, cache=learning.CACHE, report=_unsaid)
    stage = config.stages[-1]
    settings = {
        **stage.settings,
        "steps": cell.size.steps,
        "validate_every": cell.size.every,
        "learning_rate": cell.rate,
        "max_grad_norm": cell.case.max_norm,
        "optimizer": dict(cell.case.optimizer),
        "exchange": cell.exchange,
        "parallel": {"kind": "ddp", "ranks": cell.case.ranks},
    }
    settings["warmup_steps"] = min(settings["warmup_steps"], cell.size.rounds)
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="fulmen-convergence-") as folder:
        process = learning.Process(config, Path(folder), slots=learning.SLOTS)
        try:
            policy = PolicySpec(name=config.policy.name, origin=PolicyOrigin.PATH, source=str(weights))
            run, log = await process.stage(replace(stage, settings=settings), "grpo", policy, report=_unsaid)
            events = await _told(log)
        finally:
            await process.close()
    return learned_of(events, held_out=run.results["validation_accuracy_after"], seconds=perf_counter() - began)


def learned_of(events: Sequence[Event], *, held_out: float, seconds: float) -> Learned:
    """Sums a run up from what it has told of its steps."""
    steps = [event.step for event in events if event.step is not None]
    rewards = [step.values["reward_mean"] for step in steps if "reward_mean" in step.values]
    sent = [step.values["exchange_sent_bytes"] for step in steps if "exchange_sent_bytes" in step.values]
    half = len(sent) // 2
    accuracy = "validation_accuracy"
    return Learned(
        final=fmean(rewards[-LAST:]),
        curve=[(step.step, step.values[accuracy]) for step in steps if accuracy in step.values],
        sent_bytes=fmean(sent),
        late_sent_bytes=fmean(sent[half:]),
        held_out=held_out,
        events=switches(event.notice.message for event in events if event.notice is not None),
        seconds=round(seconds, 1),
    )


async def _told(log: EventLog) -> list[Event]:
    """Returns all events of a run that has ended."""
    found: list[Event] = []
    async for event in log.follow(0):
        found.append(event)
        if event.sequence == log.last_sequence:
            break
    return found


def _unsaid(record: object) -> None:
    """Does nothing: cells are reported once finished."""
