"""Measures an agent on validation and test tasks, several rollouts of each; trains nothing.

The model is whatever the agent asks for; if the run names a policy, the version is served through the engine. A
rollout that the agent failed counts as one that did not pass, with the reward `failure_reward`; one that was lost to the
machines says nothing about the agent and is left out. Both are counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field, model_validator

from fulmen_algorithm.algorithms.estimates import Estimate, bootstrap, pass_at_k, wilson
from fulmen_algorithm.algorithms.sampling import measuring_overrides
from fulmen_algorithm.rollouts.groups import INFRASTRUCTURE, FinishedGroup, GroupSpec, Mode, failed_one
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, RolloutLimits, RunSettings
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed

REPORTS = 20
"""Number of interim metric reports."""


class EvaluateSettings(RunSettings):
    """Settings of `evaluate`.

    Attributes:
        steps: There is one.
        samples: n, rollouts of each task.
        pass_at: The k of each pass@k; none is greater than `samples`.
        success_reward: A rollout passes with this reward or a greater one.
        failure_reward: Reward of a rollout that the agent failed, in the mean reward; at most the worst reward, or
            failures raise it.
        temperature: Sampling temperature of a policy that the run names; other models are asked as the agent asks.
        max_tokens: Maximum length of an answer of such a policy, in tokens; None for the agent's own limit.
        confidence: Of the intervals.
        resamples: Of the bootstrap.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Attempts of one rollout, where the failure is not the agent's.
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

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if bad := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(f"pass_at: {bad[0]} is not in 1 to samples, which is {self.samples}")
        return self

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits(timeout_s=self.rollout_timeout_s, attempts=self.rollout_attempts)

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
        """Returns the estimates by name; a pass@k that no task has enough rollouts for is left out."""
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
                f"Those of the agent did not pass and count as {settings.failure_reward:g}; those that were lost to the "
                "machines are left out.",
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
