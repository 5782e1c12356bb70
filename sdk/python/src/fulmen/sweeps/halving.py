"""Successive halving over training runs; the remaining trials depend only on the results of the runs.

Source: Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
(arXiv:1502.07943), algorithm 1. The remaining trials continue training from where they stopped.

Invariant: the runs are the only state. A sweep that is killed anywhere and started again finds its runs by their
names, creates the missing ones, and selects the same trials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fulmen.sweeps.file import Sweep

__all__ = ["SweepRuns", "TrialResult", "halve", "survivors"]


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """Progress of a trial.

    Attributes:
        trial: Its number, from 0.
        rung: The last rung that it was in.
        steps: Steps of that rung.
        value: Metric at that rung; None if its run ended without the metric.
        run: The run of that rung.
        why: Reason why it has no value.
    """

    trial: int
    rung: int = 0
    steps: int = 0
    value: float | None = None
    run: str = ""
    why: str = field(default="")


class SweepRuns(Protocol):
    """The runs of a sweep."""

    async def create(self, trial: int, rung: int, steps: int) -> str:
        """Creates or resumes the run of a trial for a rung, unless that was done; returns the name of its last stage."""

    async def value(self, run: str, steps: int) -> tuple[float | None, str]:
        """Waits until a run has completed the steps of a rung; returns its metric then, or None and the reason."""

    async def end(self, run: str) -> None:
        """Cancels a run that is eliminated, if it has not ended."""


async def halve(sweep: Sweep, runs: SweepRuns) -> list[TrialResult]:
    """Runs a sweep; returns all trials, best first.

    Raises:
        FulmenError: if the services refuse or cannot be reached; the sweep can be started again.
    """
    results = [TrialResult(trial=trial) for trial in range(sweep.trials)]
    left = list(range(sweep.trials))
    for rung, (count, steps) in enumerate(sweep.rungs):
        before, left = left, survivors(results, left, count, maximise=sweep.maximise)
        for trial in set(before) - set(left):
            await runs.end(results[trial].run)
        # One after the other, so that runs queue in the order of the trials.
        names = [await runs.create(trial, rung, steps) for trial in left]
        found = await asyncio.gather(*(runs.value(name, steps) for name in names))
        for trial, name, (value, why) in zip(left, names, found, strict=True):
            results[trial] = TrialResult(trial=trial, rung=rung, steps=steps, value=value, run=name, why=why)
    return [results[trial] for trial in _ranked(results, range(sweep.trials), maximise=sweep.maximise)]


def survivors(results: Sequence[TrialResult], left: Sequence[int], count: int, *, maximise: bool) -> list[int]:
    """Returns the best `count` remaining trials, by number; trials without a value are eliminated after the first rung."""
    if all(not results[trial].run for trial in left):
        return sorted(left)[:count]
    known = [trial for trial in left if results[trial].value is not None]
    return sorted(_ranked(results, known, maximise=maximise)[:count])


def _ranked(results: Sequence[TrialResult], trials: Sequence[int], *, maximise: bool) -> list[int]:
    """Sorts trials: later rungs first, then by value, equal ones by number; trials without a value last."""

    def key(trial: int) -> tuple[bool, int, float, int]:
        each = results[trial]
        value = each.value or 0.0
        return (each.value is None, -each.rung, -value if maximise else value, trial)

    return sorted(trials, key=key)
