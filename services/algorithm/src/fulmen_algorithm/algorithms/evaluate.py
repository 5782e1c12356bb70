"""Measures an agent on validation and test tasks, several rollouts of each; trains nothing.

The agent chooses the model; if the run names a policy version, an engine serves it. A rollout that failed because of
the agent did not pass and has the reward `failure_reward`; one lost to an infrastructure failure is left out. Both are
counted.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fulmen_algorithm.algorithms.sampling import measuring_overrides
from fulmen_algorithm.rollouts.groups import INFRASTRUCTURE, FinishedGroup, GroupSpec, Mode, failed_one
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, RolloutLimits, RunSettings
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed

REPORTS = 20
"""Number of interim metric reports."""
CHUNK = 256
"""Bootstrap resamples drawn per batch; bounds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its confidence interval.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval.
        high: Upper end.
    """

    mean: float
    low: float
    high: float


def pass_at_k(*, samples: int, passed: int, k: int) -> float:
    """Computes an unbiased estimate of the probability that at least one of k samples passes.

    Source: Chen et al. 2021 (arXiv:2107.03374) eq. 1: 1 - C(n - c, k) / C(n, k).

    Args:
        samples: n, at least k.
        passed: c, number of samples that passed.
        k: At least 1.

    Raises:
        ValueError: if there are fewer than k samples.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {samples} samples.")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def wilson(*, passed: int, samples: int, confidence: float) -> Estimate:
    """Returns a proportion with Wilson's score interval, which is valid at 0 and 1 and for few samples.

    Source: Wilson 1927, without continuity correction.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    mean, shrunk = passed / samples, 1 + z * z / samples
    centre = (mean + z * z / (2 * samples)) / shrunk
    half = z / shrunk * math.sqrt(mean * (1 - mean) / samples + z * z / (4 * samples * samples))
    return Estimate(mean=mean, low=max(0.0, centre - half), high=min(1.0, centre + half))


def bootstrap(values: Sequence[float], *, confidence: float, resamples: int, seed: int) -> Estimate:
    """Returns a mean over tasks with a percentile bootstrap interval; deterministic.

    Tasks are resampled instead of samples, since samples of one task depend on each other.

    Args:
        values: One number per task.
        confidence: Confidence level, such as 0.95.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.
    """
    chance, numbers = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    sizes = [min(CHUNK, resamples - start) for start in range(0, resamples, CHUNK)]
    draws = [numbers[chance.integers(0, len(numbers), size=(size, len(numbers)))].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(draws), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(mean=float(numbers.mean()), low=float(low), high=float(high))


class EvaluateSettings(RunSettings):
    """Settings of `evaluate`.

    Attributes:
        steps: Always 1.
        samples: n, rollouts per task.
        pass_at: The k of each pass@k, at most `samples`.
        success_reward: Minimum reward with which a rollout passes.
        failure_reward: Reward of a rollout that the agent failed, in the mean reward; choose at most the worst reward,
            so that failures do not raise the mean.
        temperature: Sampling temperature of the run's policy; calls to other models are not changed.
        max_tokens: Maximum length of an answer of the run's policy, in tokens; null for the agent's own limit.
        confidence: Confidence level of the intervals.
        resamples: Number of bootstrap resamples.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it continues where the lost one
            was.
    """

    steps: Literal[1] = 1
    samples: int = Field(default=4, ge=1, le=1000)
    pass_at: tuple[int, ...] = Field(default=(1,), min_length=1, max_length=20)
    success_reward: float = 1.0
    failure_reward: float = 0.0
    temperature: float = Field(default=1.0, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    resamples: int = Field(default=2000, ge=100, le=100_000)
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    rollout_attempts: int = Field(default=8, ge=1, le=100)
    rollout_restart_lost: bool = False

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if bad := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(f"pass_at: {bad[0]} is not in 1 to samples, which is {self.samples}")
        return self

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits(
            timeout_s=self.rollout_timeout_s, attempts=self.rollout_attempts, restart_lost=self.rollout_restart_lost
        )

    @property
    def overrides(self) -> dict[str, dict[str, object]]:
        """Request fields by rollout mode."""
        return measuring_overrides(temperature=self.temperature, max_tokens=self.max_tokens)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Results of the rollouts of one set of tasks.

    Attributes:
        passed: For each task, the number of passed rollouts and the number of rollouts, without lost ones.
        rewards: For each task with a rollout that was not lost, the mean reward.
        rollouts: Number of rollouts.
        failures: Number of failures by kind.
    """

    passed: list[tuple[int, int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    rollouts: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, group: FinishedGroup, *, success_reward: float, failure_reward: float = 0.0) -> None:
        """Counts the rollouts of one task."""
        scored = [r.reward for r in group.rollouts if r.succeeded and r.reward is not None]
        kept = [r for r in group.rollouts if r.scored or r.failure not in INFRASTRUCTURE]
        self.rollouts += len(group.rollouts)
        self.failures.update(r.failure or "NO_REWARD" for r in group.rollouts if not r.scored)
        self.passed.append((sum(reward >= success_reward for reward in scored), len(kept)))
        if kept:
            failed = len(kept) - len(scored)
            self.rewards.append((sum(scored) + failed * failure_reward) / len(kept))

    @property
    def lost(self) -> int:
        """Number of rollouts lost to infrastructure failures."""
        return sum(count for kind, count in self.failures.items() if kind in INFRASTRUCTURE)


class Evaluate:
    """Measures pass@k and the mean reward of an agent, with confidence intervals."""

    def __init__(self, settings: EvaluateSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Measures every set of tasks that the run names; see `Algorithm`."""
        if ctx.progress.step:
            return
        sets = {Mode.VALIDATION: ctx.inputs.validation_tasks, Mode.TEST: ctx.inputs.test_tasks}
        if ctx.served is not None:
            with ctx.recorder.spending("start"):
                await ctx.served.serve(self._settings.overrides)
        metrics: dict[str, float] = {}
        for mode, tasks in sets.items():
            if tasks:
                tally = await self._measured(ctx, mode, tasks)
                estimates = self._estimates(tally)
                metrics |= _metrics(mode, tally, estimates)
                ctx.recorder.section(
                    mode.value, title=f"Evaluation on {mode.value} tasks", markdown=self._table(tally, estimates)
                )
        ctx.recorder.result(**metrics)
        ctx.recorder.commit()
        await ctx.recorder.end_step(metrics)

    async def _measured(self, ctx: RunContext, mode: Mode, tasks: Sequence[bytes]) -> Tally:
        groups = [
            GroupSpec(group_id=f"evaluation/{mode.value}/{index}", task=task, size=self._settings.samples, mode=mode)
            for index, task in enumerate(tasks)
        ]
        tally, seen = Tally(), list[FinishedGroup]()
        every = max(1, len(groups) // REPORTS)
        with ctx.recorder.spending("validate"):
            async for group in ctx.rollouts.stream(groups):
                tally.add(
                    group,
                    success_reward=self._settings.success_reward,
                    failure_reward=self._settings.failure_reward,
                )
                if tally.failures.total() == tally.rollouts:
                    seen = [group]
                if len(tally.passed) % every == 0 and len(tally.passed) < len(groups):
                    await ctx.recorder.end_step(_so_far(mode, tally, of=len(groups)))
        if not any(count for _, count in tally.passed):
            raise RunFailed(f"Every rollout on the {mode.value} tasks was lost to infrastructure failures.")
        if tally.failures.total() == tally.rollouts:
            causes = ", ".join(f"{cause}: {count}" for cause, count in tally.failures.most_common(3))
            ctx.notify("warning", f"No rollout on the {mode.value} tasks succeeded ({causes}).{failed_one(seen)}")
        return tally

    def _estimates(self, tally: Tally) -> dict[str, Estimate]:
        """Returns the estimates by name; a pass@k for which no task has enough rollouts is left out."""
        settings, found = self._settings, dict[str, Estimate]()
        for k in settings.pass_at:
            values = [pass_at_k(samples=n, passed=c, k=k) for c, n in tally.passed if n >= k]
            if values:
                found[f"pass_at_{k}"] = self._proportion(values) if settings.samples == 1 else self._mean(values)
        if tally.rewards:
            found["reward_mean"] = self._mean(tally.rewards)
        return found

    def _proportion(self, values: Sequence[float]) -> Estimate:
        return wilson(passed=round(sum(values)), samples=len(values), confidence=self._settings.confidence)

    def _mean(self, values: Sequence[float]) -> Estimate:
        settings = self._settings
        return bootstrap(values, confidence=settings.confidence, resamples=settings.resamples, seed=settings.seed)

    def _table(self, tally: Tally, estimates: Mapping[str, Estimate]) -> str:
        settings = self._settings
        rows = [f"| {name} | {e.mean:.4g} | {e.low:.4g} to {e.high:.4g} |" for name, e in estimates.items()]
        how = f"bootstrap over tasks ({settings.resamples} resamples)"
        if settings.samples == 1:
            how = f"Wilson's score interval for pass@1, {how} for the reward"
        failures = ", ".join(f"{kind}: {count}" for kind, count in tally.failures.most_common()) or "none"
        return "\n".join(
            [
                f"| metric | estimate | {settings.confidence:.0%} interval |", "|---|---|---|", *rows, "",
                f"{len(tally.passed)} tasks, {settings.samples} rollouts each; a rollout passes with a reward of at least "
                f"{settings.success_reward:g}. Intervals: {how}. Rollouts without a reward: {failures}. "
                f"Failures of the agent did not pass and count as {settings.failure_reward:g}; infrastructure failures "
                "are left out.",
            ]
        )  # fmt: skip


def _so_far(mode: Mode, tally: Tally, *, of: int) -> dict[str, float]:
    metrics = {"tasks_done": float(len(tally.passed)), "tasks": float(of), "rollouts": float(tally.rollouts)}
    if counted := sum(n for _, n in tally.passed):
        metrics[f"{mode.value}_pass_at_1"] = sum(c for c, _ in tally.passed) / counted
    return metrics


def _metrics(mode: Mode, tally: Tally, estimates: Mapping[str, Estimate]) -> dict[str, float]:
    counts = {
        "tasks": float(len(tally.passed)),
        "rollouts": float(tally.rollouts),
        "rollouts_failed": float(tally.failures.total() - tally.lost),
        "rollouts_lost": float(tally.lost),
    }
    ends = {
        f"{name}{suffix}": value
        for name, e in estimates.items()
        for suffix, value in (("", e.mean), ("_low", e.low), ("_high", e.high))
    }
    return {f"{mode.value}_{name}": value for name, value in {**ends, **counts}.items()}


ENTRIES = (
    AlgorithmEntry(
        name="evaluate",
        settings=EvaluateSettings,
        make=Evaluate,
        needs=("agent",),
        any_of=("validation_tasks", "test_tasks"),
        trains=False,
    ),
)
