"""Group relative policy optimisation, asynchronous within a staleness limit.

How this differs from the paper (arXiv:2402.03300): advantages are not divided by the standard deviation
(arXiv:2503.20783), the upper clip is higher than the lower one and groups without variance are refilled (DAPO,
arXiv:2503.14476), there is no KL penalty, and importance weights against the sampler are truncated.

Every turn of the loop begins with what is still due for the present step, so that a run that was stopped anywhere
goes on where it was.
"""

import time
from collections.abc import Mapping

from pydantic import Field

from fulmen_algorithm.algorithms.batches import Batch, BatchBuilder
from fulmen_algorithm.algorithms.validation import Validator
from fulmen_algorithm.domain.admission import groups_admitted
from fulmen_algorithm.domain.algorithm import AlgorithmSettings, RolloutLimits, permutation
from fulmen_algorithm.domain.context import RunContext
from fulmen_algorithm.training.advantages import StdNormalisation
from fulmen_algorithm.training.losses import Aggregation, LossSettings
from fulmen_algorithm.training.step import BatchSettings, StepResult, StepSettings


class GrpoSettings(AlgorithmSettings):
    """Settings of `grpo`, beside the common ones. The defaults were tried on models of 0.5 to 5 M parameters.

    Attributes:
        prompts_per_step: B, groups of one training step.
        group_size: Rollouts of one task.
        temperature: Sampling temperature of training rollouts; it reaches the engine by the route.
        max_tokens: Longest answer of one model call, in tokens.
        max_staleness: eta, steps that a rollout's policy may lag behind; 0 is fully synchronous.
        epochs: Passes over the rows of a step.
        minibatches: Optimiser steps per pass.
        clip_low: The probability ratio counts no lower than 1 - clip_low.
        clip_high: And no higher than 1 + clip_high.
        importance_cap: C of truncated importance sampling; null switches it off.
        aggregation: `token_mean` for single-turn agents, `per_rollout_mean` for multi-turn ones.
        advantage_std: `none`, `group` or `batch`: what centred rewards are divided by.
        refill_limit: A step looks at no more than prompts_per_step * (1 + refill_limit) groups; then it trains on those
            that were worth it, however few. Without a limit a policy that solves everything would never finish.
        mask_truncated: Leaves rollouts out whose answer ended at `max_tokens`, instead of scoring them.
        validate_every: Steps between validations; there is always one at the start and one at the end.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Attempts of one rollout, where the failure is not the agent's.
    """

    learning_rate: float = Field(default=5e-4, gt=0, le=1)
    warmup_steps: int = Field(default=5, ge=0)
    prompts_per_step: int = Field(default=32, ge=1, le=4096)
    group_size: int = Field(default=8, ge=2, le=1000)
    temperature: float = Field(default=1.0, gt=0, le=2)
    max_tokens: int = Field(default=64, ge=1, le=1_048_576)
    max_staleness: int = Field(default=4, ge=0, le=1000)
    epochs: int = Field(default=1, ge=1, le=100)
    minibatches: int = Field(default=4, ge=1, le=1000)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0, le=10)
    importance_cap: float | None = Field(default=2.0, gt=0)
    aggregation: str = Field(default=Aggregation.TOKEN_MEAN.value, pattern="^(token_mean|per_rollout_mean)$")
    advantage_std: str = Field(default=StdNormalisation.NONE.value, pattern="^(none|group|batch)$")
    refill_limit: float = Field(default=1.0, ge=0, le=100)
    mask_truncated: bool = True
    validate_every: int = Field(default=20, ge=1)
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    rollout_attempts: int = Field(default=8, ge=1, le=100)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps * self.epochs * self.minibatches

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits(timeout_s=self.rollout_timeout_s, attempts=self.rollout_attempts)


class Grpo:
    """Samples groups, trains on how each rollout did against its group, publishes, and again."""

    def __init__(self, settings: GrpoSettings) -> None:
        self._settings = settings
        self._step_settings = StepSettings(
            loss=LossSettings(
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                importance_cap=settings.importance_cap,
                aggregation=Aggregation(settings.aggregation),
            ),
            temperature=settings.temperature,
            max_grad_norm=settings.max_grad_norm,
            token_budget=settings.token_budget,
        )
        self._batch_settings = BatchSettings(minibatches=settings.minibatches, epochs=settings.epochs)

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end; see `Algorithm`."""
        settings = self._settings
        validator = Validator(ctx)
        batches = BatchBuilder(
            ctx,
            groups=settings.prompts_per_step,
            most=int(settings.prompts_per_step * (1 + settings.refill_limit)),
            max_staleness=settings.max_staleness,
            mask_truncated=settings.mask_truncated,
            token_budget=settings.token_budget,
            std=StdNormalisation(settings.advantage_std),
        )
        with ctx.recorder.spending("start"):
            await ctx.policy.serve(self._overrides())
        figures: dict[str, float] = {}
        began, tokens = time.monotonic(), await ctx.policy.sampled_tokens()
        while True:
            step = ctx.progress.step
            if not ctx.policy.version:
                with ctx.recorder.spending("publish"):
                    await ctx.policy.publish()
            await self._admit(ctx)
            if step % settings.validate_every == 0 or step == settings.steps:
                with ctx.recorder.spending("validate"):
                    figures |= await validator.validate(last=step == settings.steps)
            if figures:
                sampled = await ctx.policy.sampled_tokens()
                figures |= _rates(figures, seconds=time.monotonic() - began, tokens=sampled - tokens)
                began, tokens = time.monotonic(), sampled
                await ctx.recorder.end_step(figures)
            if step == settings.steps:
                return
            with ctx.recorder.spending("generation_wait"):
                batch = await batches.collect(refill=lambda: self._admit(ctx, seen=batches.seen, kept=batches.kept))
            with ctx.recorder.spending("train"):
                results = await self._train(ctx, batch)
                ctx.recorder.commit(batch.consumed)
            figures = {**batch.figures, **_means(results)}
            ctx.recorder.result(reward_mean=figures["reward_mean"])

    async def _train(self, ctx: RunContext, batch: Batch) -> list[StepResult]:
        step = ctx.progress.step
        return await ctx.policy.train(
            batch.rows,
            settings=self._step_settings,
            batch=self._batch_settings,
            seed=self._settings.seed * 1_000_003 + step,
            current_version=step,
        )

    async def _admit(self, ctx: RunContext, *, seen: int = 0, kept: int = 0) -> None:
        """Submits as many groups as the admission rule allows.

        Args:
            ctx: The run.
            seen: Groups that were dealt with in the step that is being collected.
            kept: Those of them that will be trained on.
        """
        settings, tasks = self._settings, ctx.inputs.train_tasks
        allowed = groups_admitted(
            running=ctx.rollouts.submitted - len(ctx.progress.consumed) - seen,
            kept=kept,
            version=ctx.progress.step,
            groups_per_step=settings.prompts_per_step,
            max_staleness=settings.max_staleness,
            steps=settings.steps,
        )
        for _ in range(allowed):
            epoch, offset = divmod(ctx.rollouts.next_index, len(tasks))
            order = permutation(len(tasks), settings.seed, epoch)
            await ctx.rollouts.submit(tasks[order[offset]], size=settings.group_size)

    def _overrides(self) -> dict[str, dict[str, object]]:
        settings = self._settings
        length = {"max_tokens": settings.max_tokens}
        return {
            "train": {"temperature": settings.temperature, **length},
            "validation": {"temperature": 0, **length},
            "test": {"temperature": 0, **length},
        }


def _rates(figures: Mapping[str, float], *, seconds: float, tokens: int) -> dict[str, float]:
    """Computes rates over the wall time since the last report."""
    if "rollouts" not in figures:
        return {}
    return {
        "rollouts_per_second": figures["rollouts"] / seconds,
        # All tokens that the engine has sampled, those of validations and of groups without variance too.
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
    }


def _means(results: list[StepResult]) -> dict[str, float]:
    """Averages the figures of the optimiser steps of one training step; counts are summed."""
    if not results:
        return {"optimizer_steps": 0.0}
    metrics = [r.as_metrics() for r in results]
    means = {key: sum(m.get(key, 0.0) for m in metrics) / len(metrics) for key in metrics[-1] if key != "seconds"}
    means["tokens"] = sum(m.get("tokens", 0.0) for m in metrics)
    means["staleness_max"] = max(m.get("staleness_max", 0.0) for m in metrics)
    return {
        **means,
        "skipped": float(sum(r.skipped for r in results)),
        "train_seconds": sum(r.seconds for r in results),
        "optimizer_steps": float(len(results)),
    }
