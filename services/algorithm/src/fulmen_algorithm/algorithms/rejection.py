"""Rejection sampling: the policy imitates its own best answers.

Source: RAFT (arXiv:2304.06767), with `keep = {kind = "best"}`; with `{kind = "threshold"}` it is rejection sampling as
in STaR and Llama 2 (arXiv:2203.14465, 2307.09288). The captured tokens are imitated; text is not tokenised
again. Each step samples from the weights of the previous step.
"""

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fulmen_algorithm.algorithms.monitors import LengthLimits, LengthMonitor, tell_unchanged
from fulmen_algorithm.algorithms.policy_gradient import means
from fulmen_algorithm.algorithms.sampling import SamplingSettings, sample_groups, supervised_rows, within
from fulmen_algorithm.algorithms.validation import Validator
from fulmen_algorithm.rollouts.groups import INFRASTRUCTURE, FinishedGroup, FinishedRollout, failed_one
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, short_warm_up
from fulmen_algorithm.runs.collapse import GROUPS, REWARD, SPREAD
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.progress import Consumed, Outcome
from fulmen_algorithm.training.defaults import SUPERVISED, RateBySize
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import StepResult
from fulmen_algorithm.training.strict import Strict

LOST_STEPS = 10
"""The run fails after this many steps in a row without a usable rollout."""


class KeepBest(Strict):
    """Keeps the best rollouts of each group, whatever their reward.

    Attributes:
        count: Number of rollouts per group.
    """

    kind: Literal["best"] = "best"
    count: int = Field(default=1, ge=1, le=1000)

    def chosen(self, ranked: Sequence[tuple[FinishedRollout, float]]) -> Sequence[FinishedRollout]:
        """Chooses among a group's rollouts, the best first."""
        return [rollout for rollout, _ in ranked[: self.count]]


class KeepThreshold(Strict):
    """Keeps the rollouts whose reward reaches a threshold.

    Attributes:
        min_reward: Minimum reward.
        max_per_group: Maximum number per group, best first, so that easy tasks do not outweigh the others.
    """

    kind: Literal["threshold"]
    min_reward: float = 1.0
    max_per_group: int = Field(default=1000, ge=1, le=1000)

    def chosen(self, ranked: Sequence[tuple[FinishedRollout, float]]) -> Sequence[FinishedRollout]:
        """Chooses among a group's rollouts, the best first."""
        return [rollout for rollout, reward in ranked if reward >= self.min_reward][: self.max_per_group]


class RejectionSettings(SamplingSettings):
    """Settings of `rejection`, in addition to those of sampling.

    Attributes:
        group_size: n, rollouts per task.
        keep: Rollouts that are imitated: `{kind = "best", count = 1}` or `{kind = "threshold", min_reward = 1.0}`.
        epochs: Passes over the rows of a step.
        minibatches: Optimiser steps per pass.
        mask_truncated: Leaves out rollouts whose answer reached the token limit: an incomplete answer is not a good
            example.
    """

    default_rate: ClassVar[RateBySize] = SUPERVISED
    warmup_steps: int = Field(default_factory=short_warm_up(5), ge=0)
    group_size: int = Field(default=8, ge=1, le=1000)
    keep: Annotated[KeepBest | KeepThreshold, Field(discriminator="kind")] = KeepBest()
    epochs: int = Field(default=1, ge=1, le=100)
    minibatches: int = Field(default=1, ge=1, le=1000)
    mask_truncated: bool = True

    @property
    def length_limits(self) -> LengthLimits:
        """Limits of lengths, beyond which rollouts are cut off or left out."""
        return LengthLimits(
            mask_truncated=self.mask_truncated, max_tokens=self.answer_tokens, token_budget=self.token_budget
        )

    @property
    def optimizer_steps_per_step(self) -> int:
        """Maximum number of optimiser steps in one step of the run."""
        return self.epochs * self.minibatches


class Rejection:
    """Samples groups, imitates the policy's best answers, publishes, and repeats."""

    def __init__(self, settings: RejectionSettings) -> None:
        self._settings = settings
        self._lost_steps = 0

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end; see `Algorithm`."""
        settings, validator = self._settings, Validator(ctx, failure_reward=self._settings.failure_reward)
        lengths = LengthMonitor(settings.length_limits, ctx.notify)
        with ctx.recorder.spending("start"):
            await ctx.policy.serve(settings.overrides)
        metrics: dict[str, float] = {}
        while True:
            began, step = time.monotonic(), ctx.progress.step
            with ctx.recorder.spending("publish"):
                await ctx.policy.publish()
                metrics |= ctx.policy.publish_metrics
            if step % settings.validate_every == 0 or step == settings.steps or ctx.recorder.pauses:
                with ctx.recorder.spending("validate"):
                    metrics |= await validator.validate(last=step == settings.steps)
            if metrics or not ctx.progress.ended:
                await ctx.recorder.end_step(metrics)
            if step == settings.steps:
                tell_unchanged(ctx.progress, ctx.notify)
                return
            with ctx.recorder.spending("generation_wait"):
                groups = await sample_groups(
                    ctx, count=settings.prompts_per_step, size=settings.group_size, seed=settings.seed
                )
                found = await ctx.rollouts.trajectories(groups)
            policy = ctx.run.policy.name
            kept = {group.group_id: self._kept(group, found, lengths, policy=policy) for group in groups}
            self._check(ctx, groups)
            rows = [row for members in kept.values() for rows in members.values() for row in rows]
            with ctx.recorder.spending("train"):
                results = await self._train(ctx, rows)
                consumed = [_consumed(group, kept[group.group_id]) for group in groups]
                ctx.recorder.commit(consumed, changed=any(result.taken for result in results))
            metrics = {**_metrics(groups, kept), **lengths.end_step(ctx.progress.step), **means(results)}
            metrics["step_seconds"] = time.monotonic() - began
            ctx.recorder.result(reward_mean=metrics["reward_mean"])

    def _kept(
        self, group: FinishedGroup, found: Mapping[str, RolloutTrajectory], lengths: LengthMonitor, *, policy: str
    ) -> dict[str, list[Row]]:
        """Returns the rows of the imitated rollouts by name; equal answers of a group count once."""
        usable: list[tuple[FinishedRollout, float]] = []
        rows: dict[str, list[Row]] = {}
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for rollout in group.rollouts:
            trajectory = found.get(rollout.name)
            if rollout.reward is None or not rollout.scored or trajectory is None:
                continue
            made = supervised_rows(rollout.name, trajectory, policy=policy)
            tokens = tuple(row.token_ids for row in made)
            lengths.count(truncated=trajectory.truncated, longest_row=max(map(len, tokens), default=0))
            cut = self._settings.mask_truncated and trajectory.truncated
            # A rollout with a part that is too long is left out completely: half an answer is not a good example.
            if cut or not made or tokens in seen or len(within(made, self._settings.token_budget)) < len(made):
                continue
            seen.add(tokens)
            usable.append((rollout, rollout.reward))
            rows[rollout.name] = made
        ranked = sorted(usable, key=lambda pair: (-pair[1], pair[0].name))
        return {rollout.name: rows[rollout.name] for rollout in self._settings.keep.chosen(ranked)}

    def _check(self, ctx: RunContext, groups: Sequence[FinishedGroup]) -> None:
        """Warns about a step without a usable rollout because of infrastructure failures.

        Raises:
            RunFailed: if all agents of a step failed, or the infrastructure failed too many steps.
        """
        rollouts = [r for group in groups for r in group.rollouts]
        causes = Counter(r.failure or "no reward" for r in rollouts if not r.scored)
        if causes.total() < len(rollouts):
            self._lost_steps = 0
            return
        shown = ", ".join(f"{cause}: {count}" for cause, count in causes.most_common(3))
        text = f"No rollout of {len(groups)} groups could be used ({shown})."
        if not causes.keys() & INFRASTRUCTURE:
            raise RunFailed(f"{text}{failed_one(groups)}")
        self._lost_steps += 1
        where = f"Check the runners: `fulmen runners`.{failed_one(groups)}"
        if self._lost_steps == LOST_STEPS:
            raise RunFailed(f"{text} The same in {LOST_STEPS} steps in a row. {where}")
        ctx.notify("warning", f"{text} The step trains on nothing. {where}")

    async def _train(self, ctx: RunContext, rows: Sequence[Row]) -> list[StepResult]:
        settings, results = self._settings, list[StepResult]()
        chance = random.Random(f"{settings.seed}/{ctx.progress.step}")
        for _ in range(settings.epochs if rows else 0):
            order = chance.sample(range(len(rows)), len(rows))
            for part in range(min(settings.minibatches, len(rows))):
                batch = [rows[i] for i in order[part :: settings.minibatches]]
                results.append(await ctx.policy.train_supervised(batch, settings=settings.supervised_step))
        return results


def _consumed(group: FinishedGroup, kept: Mapping[str, object]) -> Consumed:
    outcome = Outcome.TRAINED if kept else Outcome.TOO_FEW_USABLE
    return Consumed(group=group, outcome=outcome, trained=tuple(sorted(kept)))


def _metrics(groups: Sequence[FinishedGroup], kept: Mapping[str, Mapping[str, Sequence[Row]]]) -> dict[str, float]:
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = {r.name: r.reward for r in rollouts if r.scored and r.reward is not None}
    imitated = {name: rows for members in kept.values() for name, rows in members.items()}
    return {
        REWARD: sum(rewards.values()) / max(len(rewards), 1),
        SPREAD: pstdev(rewards.values()) if rewards else 0.0,
        GROUPS: float(len(groups)),
        "reward_mean_kept": sum(rewards[name] for name in imitated) / max(len(imitated), 1),
        "rollouts": float(len(rollouts)),
        "rollouts_masked": float(len(rollouts) - len(rewards)),
        "rollouts_kept": float(len(imitated)),
        "rows": float(sum(map(len, imitated.values()))),
        "groups_trained": float(sum(map(bool, kept.values()))),
        "groups_dropped": float(sum(not members for members in kept.values())),
    }


ENTRIES = (
    AlgorithmEntry(
        name="rejection",
        settings=RejectionSettings,
        make=Rejection,
        needs=("agent", "train_tasks"),
        takes=("validation_tasks",),
    ),
)
