"""Group relative policy optimisation on stored rollouts with the scores of another grader.

No training rollouts are run. Differences from `grpo`: groups come in a seeded order, without replacement within an
epoch, and have no maximum staleness. Truncated importance weights (min(proximal / sampler, C) per token) limit the
effect of such rows, but do not make them unbiased; `importance_mean`, `effective_sample_share` and `capped_share` show
their remaining weight.
"""

import time
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from fulmen_algorithm.algorithms.batches import Batch, BatchBuilder, BatchLimits
from fulmen_algorithm.algorithms.monitors import tell_unchanged
from fulmen_algorithm.algorithms.options.entropy_control import adapt_bonus
from fulmen_algorithm.algorithms.policy_gradient import PolicyGradientSettings, means
from fulmen_algorithm.algorithms.scoring import Scorer
from fulmen_algorithm.algorithms.validation import Validator
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, train_group_id
from fulmen_algorithm.rollouts.scored_groups import ScoredGroups
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, permutation
from fulmen_algorithm.runs.collapse import CollapseSettings, NoCollapse
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.settings import StepResult


class StoredGroups:
    """A source of stored groups, in a new order each epoch.

    Invariant: the n-th group that a run consumes is a function of the scores, the seed and n alone, and n is its index;
    so the indices in a checkpoint define what was trained on. No rollout comes twice in an epoch, and a step never
    spans two epochs.
    """

    def __init__(self, groups: Sequence[tuple[FinishedRollout, ...]], *, seed: int) -> None:
        self._groups = groups
        self._seed = seed
        self._next = 0
        self._end = 0

    def begin_step(self, position: int) -> None:
        """Continues after `position` consumed groups; the step ends with its epoch at the latest."""
        self._next = position
        self._end = (position // len(self._groups) + 1) * len(self._groups)

    async def poll(self, *, limit: int) -> list[FinishedGroup]:
        """Returns the next groups; none at the end of the epoch."""
        positions = range(self._next, min(self._next + limit, self._end))
        self._next += len(positions)
        return [self._group(position) for position in positions]

    def _group(self, position: int) -> FinishedGroup:
        epoch, offset = divmod(position, len(self._groups))
        order = permutation(len(self._groups), self._seed, epoch)
        # These groups come from no feed, so they have no cursor.
        return FinishedGroup(group_id=train_group_id(position), rollouts=self._groups[order[offset]], cursor="")


class ReplaySettings(PolicyGradientSettings):
    """Settings of `replay`: the common ones; `temperature` is that of the stored rollouts.

    Attributes:
        collapse: None, because the rewards of stored rollouts do not depend on the current policy.
    """

    collapse: CollapseSettings = NoCollapse()

    @model_validator(mode="after")
    def _tasks_are_not_stored(self) -> Self:
        if self.teacher.kind == "self":
            raise ValueError("teacher: kind self needs the tasks of rollouts, which scores do not have")
        return self


class Replay:
    """Trains on stored groups for several epochs."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings, scored = self._settings, _scored(ctx)
        source = StoredGroups(scored.groups, seed=settings.seed)
        batches = BatchBuilder(
            ctx,
            source=source,
            limits=BatchLimits(
                groups=settings.prompts_per_step,
                # All of them: groups that are unusable in one epoch are unusable in every epoch.
                max_groups=len(scored.groups),
                max_staleness=None,
                lengths=settings.length_limits,
            ),
            scoring=settings.scoring,
            penalty=settings.reference_penalty(ctx),
            teacher=settings.teacher_for(ctx),
        )
        validates = bool(ctx.inputs.validation_tasks)
        validator = Validator(ctx, scorer=Scorer(settings.scoring), failure_reward=settings.failure_reward)
        if validates:
            with ctx.recorder.spending("start"):
                await ctx.policy.serve(settings.overrides)
        metrics: dict[str, float] = {}
        began = time.monotonic()
        while True:
            step = ctx.progress.step
            last = step == settings.steps
            due = validates and (last or ctx.recorder.pauses or step % settings.validate_every == 0)
            if last or due:
                with ctx.recorder.spending("publish"):
                    await ctx.policy.publish()
                metrics |= ctx.policy.publish_metrics
            if due:
                with ctx.recorder.spending("validate"):
                    metrics |= await validator.validate(last=last)
            if metrics or not ctx.progress.ended:
                metrics["step_seconds"] = time.monotonic() - began
                began = time.monotonic()
                await ctx.recorder.end_step(metrics)
            if last:
                tell_unchanged(ctx.progress, ctx.notify)
                return
            source.begin_step(len(ctx.progress.consumed))
            with ctx.recorder.spending("generation_wait"):
                batch = await batches.collect()
            with ctx.recorder.spending("train"):
                results = await self._train(ctx, batch)
                ctx.recorder.commit(batch.consumed, changed=any(result.taken for result in results))
            # Versions of other runs have no place among this run's steps.
            trained = {key: value for key, value in means(results).items() if not key.startswith("staleness")}
            trained |= adapt_bonus(ctx, settings.entropy, trained)
            metrics = {**batch.metrics, **trained, "epoch": len(ctx.progress.consumed) / len(scored.groups)}
            ctx.recorder.result(reward_mean=metrics["reward_mean"])

    async def _train(self, ctx: RunContext, batch: Batch) -> list[StepResult]:
        step = ctx.progress.step
        return await ctx.policy.train(
            batch.rows,
            settings=self._settings.fitted(ctx, batch.rows).step_settings,
            batch=self._settings.batch_settings,
            seed=self._settings.shuffling_seed(step),
            current_version=step,
        )


def _scored(ctx: RunContext) -> ScoredGroups:
    """Returns the groups to train on, and reports how many were left out.

    Raises:
        RunFailed: if none is left; creation refuses such a run.
    """
    scored = ctx.inputs.scored
    if scored is None or not scored.groups:
        raise RunFailed("There are no scores to train on.")
    left_out = {"groups_stored_no_variance": scored.no_variance, "groups_stored_too_few_scored": scored.too_few}
    ctx.recorder.result(groups_stored=float(len(scored.groups)), **{key: float(n) for key, n in left_out.items()})
    if any(left_out.values()) and not ctx.progress.step:
        ctx.notify(
            "info",
            f"{len(scored.groups)} stored groups can be trained on; {scored.no_variance} have equal scores, "
            f"{scored.too_few} fewer than two scored rollouts.",
        )
    return scored


ENTRIES = (
    AlgorithmEntry(
        name="replay",
        settings=ReplaySettings,
        make=Replay,
        needs=("scores",),
        takes=("agent", "validation_tasks"),
    ),
)
