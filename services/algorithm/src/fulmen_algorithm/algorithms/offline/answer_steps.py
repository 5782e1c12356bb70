"""Training on answers whose loss depends on their whole log-probability, under any trainer.

A step measures the answers under the present weights and under the reference, has the loss compute the slope of each
answer, and takes one optimiser step along the slopes: the policy gradient whose advantages are the negative slopes. So
the loss needs the log-probabilities of whole answers and the answers of a pair need not share a micro-batch or a rank.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pydantic import Field

from fulmen_algorithm.algorithms.offline.answers import Answer
from fulmen_algorithm.algorithms.offline.epochs import EpochSettings
from fulmen_algorithm.algorithms.offline.preference_losses import Measured
from fulmen_algorithm.losses.objectives import (
    NoCorrection,
    Objective,
    Proximal,
    ReinforceLoss,
    SequenceMeanTokenSumNorm,
)
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.rows import Row, spread_advantage
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings

ALONG_THE_SLOPES = Objective(
    loss=ReinforceLoss(),
    correction=NoCorrection(),
    aggregation=SequenceMeanTokenSumNorm(length=1),
    proximal=Proximal.RECOMPUTED,
)
"""Sums advantage times log-probability over all tokens, divided by the number of rows."""
OWN = ("grad_norm", "skipped", "exploded", "learning_rate", "packing_efficiency")
"""Metrics of a step that mean something here; the others compare with a sampler."""


class AnswerSettings(EpochSettings):
    """Settings in addition to those of every algorithm on data.

    Attributes:
        held_out: Share of the prompts that are not trained on; they measure `validation_accuracy`.
    """

    held_out: float = Field(default=0.1, ge=0, lt=1)

    @property
    def uses_reference(self) -> bool:
        """Always: the loss compares with the first weights."""
        return True

    @property
    def step_settings(self) -> StepSettings:
        """Settings of the optimiser step."""
        return StepSettings(
            objective=ALONG_THE_SLOPES,
            max_grad_norm=self.max_grad_norm,
            explosion_factor=self.explosion_factor,
            token_budget=self.token_budget,
        )


class PairSettings(AnswerSettings):
    """Settings in addition to those of every algorithm on answers.

    Attributes:
        pairs_per_group: Maximum number of pairs of a group of stored rollouts: the best and the worst, the second best
            and the second worst, and so on.
        min_gap: Minimum difference between the rewards of a pair of stored rollouts.
    """

    pairs_per_group: int = Field(default=1, ge=1, le=500)
    min_gap: float = Field(default=1e-6, gt=0)


class FollowsSlopes(Protocol):
    """Trains on answers."""

    async def follow(self, answers: Sequence[Answer], slopes: Sequence[float]) -> StepResult:
        """Takes one optimiser step against the slopes of the loss."""


async def follow_rows(ctx: RunContext, rows: Sequence[Row], settings: StepSettings) -> StepResult:
    """Takes one optimiser step on rows whose advantages are the negative slopes times the number of rows."""
    step = ctx.progress.step
    results = await ctx.policy.train(rows, settings=settings, batch=BatchSettings(), seed=step, current_version=step)
    return results[0]


class AnswerTrainer:
    """Measures answers and trains on them; the reference's part is measured once per answer."""

    def __init__(self, ctx: RunContext, settings: AnswerSettings) -> None:
        self._ctx = ctx
        self._settings = settings.step_settings
        self._reference: dict[str, float] = {}

    async def measure(self, answers: Sequence[Answer]) -> list[Measured]:
        """Computes how much more likely answers are than under the reference."""
        rows = [row for answer in answers for row in answer.rows]
        new = list({a.name: a for a in answers if a.name not in self._reference}.values())
        if new:
            new_rows = [row for answer in new for row in answer.rows]
            found = await self._ctx.policy.reference_logprobs(new_rows, settings=self._settings)
            self._reference |= dict(zip((a.name for a in new), _sums(new, found), strict=True))
        present = _sums(answers, await self._ctx.policy.logprobs(rows, settings=self._settings)) if rows else []
        return [
            Measured(ratio=logprob - self._reference[answer.name], tokens=answer.tokens)
            for answer, logprob in zip(answers, present, strict=True)
        ]

    async def follow(self, answers: Sequence[Answer], slopes: Sequence[float]) -> StepResult:
        """Takes one optimiser step against the slopes of the loss by each token's log-probability."""
        count = sum(len(answer.rows) for answer in answers)
        rows = [
            _with_advantage(row, -slope * count)
            for answer, slope in zip(answers, slopes, strict=True)
            for row in answer.rows
        ]
        return await follow_rows(self._ctx, rows, self._settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessed:
    """A batch under its loss, before the step.

    Attributes:
        answers: Answers of the batch.
        slopes: Slope of each; empty if the batch is only measured.
        metrics: `loss`, `accuracy` and others.
    """

    answers: Sequence[Answer]
    slopes: Sequence[float]
    metrics: dict[str, float]


Assess = Callable[[Sequence[int]], Awaitable[Assessed]]
"""Measures the examples with these indices: those to train on, then those held out."""


async def train_on_answers(
    ctx: RunContext, settings: AnswerSettings, trainer: FollowsSlopes, assess: Assess, *, count: int, held_out: int
) -> None:
    """Trains to the end and publishes.

    Args:
        ctx: The run.
        settings: Its settings.
        trainer: Takes the steps.
        assess: The loss.
        count: Examples to train on.
        held_out: Examples after them that are only measured.

    Raises:
        RunFailed: if the warm-up is longer than the run.
        Interrupted: if the run was asked to stop.
    """
    steps = settings.planned(count, "examples")
    ctx.recorder.plan(steps)
    ctx.recorder.result(examples=float(count), examples_held_out=float(held_out))

    async def validated(name: str) -> dict[str, float]:
        if not held_out:
            return {}
        with ctx.recorder.spending("validate"):
            found = (await assess(range(count, count + held_out))).metrics
        ctx.recorder.result(**{f"validation_accuracy{name}": found["accuracy"]})
        return {"validation_accuracy": found["accuracy"], "validation_loss": found["loss"]}

    if not ctx.progress.step and held_out:
        await ctx.recorder.end_step(await validated("_before"))

    async def trained() -> dict[str, float]:
        started = time.monotonic()
        with ctx.recorder.spending("train"):
            batch = await assess(settings.batch(ctx.progress.step, count))
            result = await trainer.follow(batch.answers, batch.slopes)
            ctx.recorder.commit()
        own = {name: value for name, value in result.as_metrics().items() if name in OWN}
        tokens = sum(answer.tokens for answer in batch.answers)
        return {**own, **batch.metrics, "tokens_per_second": tokens / max(time.monotonic() - started, 1e-9)}

    while ctx.progress.step < steps or not ctx.progress.ended:
        # A run that was stopped within a step has trained it.
        metrics = await trained() if ctx.progress.ended else {}
        last = ctx.progress.step == steps
        if last:
            await ctx.policy.publish()
        if not (last or ctx.recorder.pauses) and ctx.progress.step % settings.report_every:
            await ctx.recorder.end_quiet_step()
            continue
        if metrics:
            ctx.recorder.result(loss=metrics["loss"], accuracy=metrics["accuracy"])
        metrics["epoch"] = ctx.progress.step * settings.batch_size / count
        await ctx.recorder.end_step({**metrics, **await validated("_after")})


def _sums(answers: Sequence[Answer], logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Adds up the log-probabilities of the sampled tokens of each answer."""
    rows = iter(logprobs)
    return [
        sum(value for row in answer.rows for value, trains in zip(next(rows), row.loss_mask, strict=True) if trains)
        for answer in answers
    ]


def _with_advantage(row: Row, advantage: float) -> Row:
    return replace(row, advantages=spread_advantage(advantage, row.loss_mask))
