"""Group relative policy optimisation, asynchronous within a staleness limit.

How this differs from the paper (arXiv:2402.03300): advantages are not divided by the standard deviation
(arXiv:2503.20783), the upper clip is higher than the lower one and groups without variance are refilled (DAPO,
arXiv:2503.14476), no KL penalty, and truncated importance weights against the sampler.

Each iteration first completes the present step, so that a run stopped anywhere
resumes exactly there.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from fulmen_algorithm.algorithms.batches import Batch, BatchBuilder, BatchLimits
from fulmen_algorithm.algorithms.monitors import MismatchMonitor, SignalMonitor
from fulmen_algorithm.algorithms.policy_gradient import PolicyGradientSettings, means
from fulmen_algorithm.algorithms.sampling import submit_next
from fulmen_algorithm.algorithms.scoring import Scorer
from fulmen_algorithm.algorithms.validation import Validator
from fulmen_algorithm.losses.advantages import MIN_COMPARED, compares_groups
from fulmen_algorithm.policy.engine_settings import MismatchSettings
from fulmen_algorithm.rollouts.admission import groups_admitted
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.settings import StepResult


class GrpoSettings(PolicyGradientSettings):
    """Settings of `grpo`, beside the common ones.

    Attributes:
        group_size: Rollouts of one task.
        max_staleness: eta, steps that a rollout's policy may lag behind; 0 is fully synchronous.
        refill_limit: A step looks at no more than prompts_per_step * (1 + refill_limit) groups; then it trains on those
            that were worth it, however few. Without a limit a policy that solves everything would never finish.
        engine_mismatch: When engine and trainer disagree too much about the probabilities of the same tokens.
    """

    group_size: int = Field(default=8, ge=2, le=1000)
    max_staleness: int = Field(default=4, ge=0, le=1000)
    refill_limit: float = Field(default=1.0, ge=0, le=100)
    engine_mismatch: MismatchSettings = MismatchSettings()

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        if self.group_size < MIN_COMPARED and compares_groups(self.scoring):
            raise ValueError(
                f"group_size: must be at least 2, because {self.advantage.kind} compares the rollouts of a group"
            )
        return self


class Grpo:
    """Samples groups, trains on each rollout relative to its group, publishes, and repeats."""

    def __init__(self, settings: GrpoSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end; see `Algorithm`."""
        settings = self._settings
        scorer, watch = Scorer(settings.scoring), MismatchMonitor(settings.engine_mismatch, ctx.notify)
        signal = SignalMonitor(ctx.notify, over=len(ctx.progress.consumed) > ctx.progress.dropped)
        validator = Validator(ctx, score=scorer.total, parts=scorer.parts, failure_reward=settings.failure_reward)
        batches = BatchBuilder(
            ctx,
            source=ctx.rollouts,
            limits=BatchLimits(
                groups=settings.prompts_per_step,
                max_groups=int(settings.prompts_per_step * (1 + settings.refill_limit)),
                max_staleness=settings.max_staleness,
                mask_truncated=settings.mask_truncated,
                token_budget=settings.token_budget,
            ),
            scoring=settings.scoring,
            policy=ctx.run.policy.name,
            penalty=settings.reference_penalty(ctx),
        )
        with ctx.recorder.spending("start"):
            await ctx.policy.serve(settings.overrides)
        metrics: dict[str, float] = {}
        began, tokens = time.monotonic(), await ctx.policy.sampled_tokens()
        while True:
            step = ctx.progress.step
            if not ctx.policy.version:
                with ctx.recorder.spending("publish"):
                    await ctx.policy.publish()
                    metrics |= ctx.policy.publish_metrics
            with ctx.recorder.spending("submit"):
                await self._admit(ctx)
            if step % settings.validate_every == 0 or step == settings.steps:
                with ctx.recorder.spending("validate"):
                    metrics |= await validator.validate(last=step == settings.steps)
            if metrics:
                sampled = await ctx.policy.sampled_tokens()
                metrics |= _rates(metrics, seconds=time.monotonic() - began, tokens=sampled - tokens)
                began, tokens = time.monotonic(), sampled
                await ctx.recorder.end_step(metrics)
            if step == settings.steps:
                return
            with ctx.recorder.spending("generation_wait"):
                batch = await batches.collect(refill=lambda: self._admit(ctx, seen=batches.seen, kept=batches.settled))
            with ctx.recorder.spending("train"):
                results = await self._train(ctx, batch)
                ctx.recorder.commit(batch.consumed)
            metrics = {**batch.metrics, **means(results)}
            watch.check(ctx.progress.step, metrics)
            signal.check(ctx.progress.step, metrics)
            ctx.recorder.result(reward_mean=metrics["reward_mean"])

    async def _train(self, ctx: RunContext, batch: Batch) -> list[StepResult]:
        step = ctx.progress.step
        return await ctx.policy.train(
            batch.rows,
            settings=self._settings.step_settings,
            batch=replace(self._settings.batch_settings, measure_mismatch=True),
            seed=self._settings.shuffling_seed(step),
            current_version=step,
        )

    async def _admit(self, ctx: RunContext, *, seen: int = 0, kept: int = 0) -> None:
        """Submits as many groups as the admission rule allows.

        Args:
            ctx: The run.
            seen: Groups consumed in the step being collected.
            kept: Those of them that need no refill.
        """
        settings = self._settings
        allowed = groups_admitted(
            running=ctx.rollouts.submitted - len(ctx.progress.consumed) - seen,
            kept=kept,
            version=ctx.progress.step,
            groups_per_step=settings.prompts_per_step,
            max_staleness=settings.max_staleness,
            steps=settings.steps,
        )
        for _ in range(allowed):
            await submit_next(ctx, size=settings.group_size, seed=settings.seed)


def _rates(metrics: Mapping[str, float], *, seconds: float, tokens: int) -> dict[str, float]:
    """Computes rates over the wall time since the last report."""
    if "rollouts" not in metrics:
        return {}
    return {
        "rollouts_per_second": metrics["rollouts"] / seconds,
        # All tokens that the engine has sampled, those of validations and of groups without variance too.
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
    }


ENTRIES = (
    AlgorithmEntry(
        name="grpo", settings=GrpoSettings, make=Grpo, needs=("agent", "train_tasks"), takes=("validation_tasks",)
    ),
)
