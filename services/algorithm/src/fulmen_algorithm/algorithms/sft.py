"""Supervised fine-tuning on demonstrations; publishes one version, at the end."""

import time

from pydantic import Field

from fulmen_algorithm.domain.algorithm import AlgorithmSettings, permutation
from fulmen_algorithm.domain.context import RunContext
from fulmen_algorithm.domain.failure import RunFailed
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.sft import sft_row
from fulmen_algorithm.training.step import StepSettings


class SftSettings(AlgorithmSettings):
    """Settings of `sft`, beside the common ones.

    Attributes:
        batch_size: Demonstrations per step; each epoch is a new permutation by the seed.
        report_every: Steps between two reports of figures.
    """

    steps: int = Field(default=200, ge=1, le=1_000_000)
    learning_rate: float = Field(default=1e-3, gt=0, le=1)
    schedule: str = Field(default="cosine", pattern="^(constant|linear|cosine)$")
    warmup_steps: int = Field(default=10, ge=0)
    checkpoint_every: int = Field(default=100, ge=1)
    batch_size: int = Field(default=64, ge=1, le=65536)
    report_every: int = Field(default=10, ge=1)


class Sft:
    """Minimises the cross-entropy of the assistant's tokens."""

    def __init__(self, settings: SftSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings = self._settings
        rows = self._rows(ctx)
        step_settings = StepSettings(max_grad_norm=settings.max_grad_norm, token_budget=settings.token_budget)
        while ctx.progress.step < settings.steps:
            started = time.monotonic()
            batch = [rows[i] for i in self._batch(ctx.progress.step, len(rows))]
            with ctx.recorder.spending("train"):
                result = await ctx.policy.train_supervised(batch, settings=step_settings)
                ctx.recorder.commit()
            if ctx.progress.step == settings.steps:
                await ctx.policy.publish()
            if ctx.progress.step % settings.report_every == 0 or ctx.progress.step == settings.steps:
                tokens = sum(row.trained_tokens for row in batch)
                ctx.recorder.result(loss=result.loss)
                figures = {"tokens_per_second": tokens / max(time.monotonic() - started, 1e-9)}
                await ctx.recorder.end_step({**result.as_metrics(), **figures})
            else:
                await ctx.recorder.end_quiet_step()
        # A stop between the last step and its publication is made good here.
        await ctx.policy.publish()

    def _rows(self, ctx: RunContext) -> list[Row]:
        tokenizer = ctx.policy.model.tokenizer
        rows = []
        for number, demonstration in enumerate(ctx.inputs.demonstrations, start=1):
            try:
                row = sft_row(tokenizer, demonstration.messages, row_id=str(number), tools=demonstration.tools or None)
            except ValueError as error:
                raise RunFailed(f"Demonstration {number}: {error}") from error
            if len(row.token_ids) > self._settings.token_budget:
                raise RunFailed(f"Demonstration {number} has more tokens than token_budget.")
            rows.append(row)
        return rows

    def _batch(self, step: int, count: int) -> list[int]:
        """Chooses the demonstrations of a step: a function of the seed and the step, so that nothing need be kept."""
        size = self._settings.batch_size
        positions = range(step * size, (step + 1) * size)
        epochs = range(positions[0] // count, positions[-1] // count + 1)
        orders = {epoch: permutation(count, self._settings.seed, epoch) for epoch in epochs}
        return [orders[p // count][p % count] for p in positions]
