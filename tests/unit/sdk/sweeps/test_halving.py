"""Successive halving: who is left is a function of the runs, wherever the process that asks was killed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.sweeps.file import Range, Sweep
from fulmen.sweeps.halving import TrialResult, halve
from fulmen.sweeps.trials import metric_of


def a_sweep(trials: int, rungs: int, factor: int, *, maximise: bool = True) -> Sweep:
    return Sweep(
        file=Path("sweep.toml"), name="s", train=Path("train.toml"), trials=trials, metric="m", maximise=maximise, seed=0,
        steps_setting="sft.steps", min_steps=2, max_steps=2 * factor ** (rungs - 1), factor=factor,
        search={"sft.learning_rate": Range(low=0.0, high=1.0)},
    )  # fmt: skip


class Killed(Exception):
    """The process was killed."""


class StoredRuns:
    """Runs that survive the process which creates them; a trial fails if its value is None."""

    def __init__(self, values: dict[tuple[int, int], float | None]) -> None:
        self._values = values
        self.created: list[tuple[int, int, int]] = []
        self.ended: set[str] = set()
        self.calls_left = 10**9

    def _called(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Killed

    async def create(self, trial: int, rung: int, steps: int) -> str:
        self._called()
        if (trial, rung, steps) not in self.created:
            self.created.append((trial, rung, steps))
            self._called()
        return f"{trial}/{rung}"

    async def value(self, run: str, steps: int) -> tuple[float | None, str]:
        self._called()
        assert (*map(int, run.split("/")), steps) in self.created
        trial, rung = map(int, run.split("/"))
        found = self._values[trial, rung]
        return found, "" if found is not None else "failed"

    async def end(self, run: str) -> None:
        self._called()
        self.ended.add(run)


def reference(values: np.ndarray, factor: int, maximise: bool) -> list[set[int]]:
    """Algorithm 1 of arXiv:1502.07943: S_0 = [n], S_{k+1} the best |S_0| / eta^(k+1) of S_k; [trials, rungs]."""
    signed = values if maximise else -values
    left, found = np.arange(len(values)), []
    for rung in range(values.shape[1]):
        found.append(set(left.tolist()))
        order = np.argsort(-signed[left, rung], kind="stable")
        left = np.sort(left[order][: len(values) // factor ** (rung + 1)])
    return found


@given(
    rungs=st.integers(1, 3),
    factor=st.integers(2, 3),
    more=st.integers(0, 7),
    maximise=st.booleans(),
    seed=st.integers(0, 99),
)
async def test_the_trials_of_each_rung_are_those_of_the_paper(rungs, factor, more, maximise, seed):
    trials = max(2, factor ** (rungs - 1)) + more
    values = np.random.default_rng(seed).permutation(trials * rungs).reshape(trials, rungs).astype(float)
    runs = StoredRuns({(t, r): values[t, r] for t in range(trials) for r in range(rungs)})

    results = await halve(a_sweep(trials, rungs, factor, maximise=maximise), runs)

    for rung, expected in enumerate(reference(values, factor, maximise)):
        assert {trial for trial, at, _ in runs.created if at == rung} == expected
    out = {f"{each.trial}/{each.rung}" for each in results if each.rung < rungs - 1}
    assert runs.ended == out
    assert sorted(each.trial for each in results) == list(range(trials))
    last = [each for each in results if each.rung == rungs - 1]
    assert results[: len(last)] == last
    best = max if maximise else min
    assert results[0].value == best(each.value for each in last)


@pytest.mark.parametrize("seed", range(5))
async def test_a_sweep_that_is_killed_again_and_again_creates_every_run_once_and_ends_the_same(seed):
    chance, sweep = random.Random(seed), a_sweep(9, 3, 3)
    values: dict[tuple[int, int], float | None] = {(t, r): chance.random() for t in range(9) for r in range(3)}
    whole = StoredRuns(values)
    expected = await halve(sweep, whole)
    runs, lives = StoredRuns(values), 0
    results: list[TrialResult] = []
    while not results:
        runs.calls_left = chance.randrange(10, 40)
        lives += 1
        try:
            results = await halve(sweep, runs)
        except Killed:
            continue
    assert lives > 1 or seed
    assert results == expected
    assert runs.created == whole.created


async def test_trials_whose_runs_fail_are_out_and_come_last():
    values: dict[tuple[int, int], float | None] = {(t, r): float(t) for t in range(4) for r in range(2)}
    values |= {(3, 0): None, (2, 1): None}
    results = await halve(a_sweep(4, 2, 2), StoredRuns(values))
    assert [(each.trial, each.rung, each.value) for each in results] == [
        (1, 1, 1.0),
        (0, 0, 0.0),
        (2, 1, None),
        (3, 0, None),
    ]
    assert results[-1].why == "failed"
    nobody = await halve(a_sweep(4, 2, 2), StoredRuns(dict.fromkeys(values)))
    assert {each.value for each in nobody} == {None}


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_result_that_is_not_finite_is_none(value: float) -> None:
    assert metric_of({"loss": value, "reward": 0.5}, "loss") == (None, f"its loss is {value}")
    assert metric_of({"loss": value, "reward": 0.5}, "reward") == (0.5, "")
    assert metric_of({}, "reward") == (None, "has no reward, only no results")
