"""Supervised fine-tuning on demonstrations or on another run's successful rollouts; publishes one version, at the end.

The loss on held-out data (`validation_demonstrations`) is measured before the first step and with every report.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fulmen_algorithm.algorithms.offline.epochs import EpochSettings
from fulmen_algorithm.algorithms.offline.stored_rows import imitable_rows
from fulmen_algorithm.algorithms.sampling import within
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.creation.inputs import Demonstration
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.defaults import SUPERVISED, RateBySize
from fulmen_algorithm.training.rows import Row, sft_row
from fulmen_algorithm.training.settings import StepSettings


class SftSettings(EpochSettings):
    """Settings of `sft`, in addition to those of every algorithm on data.

    Attributes:
        min_reward: Minimum reward of the other run's rollouts.
        max_per_task: Maximum number of rollouts of one group, best first.
    """

    default_rate: ClassVar[RateBySize] = SUPERVISED
    min_reward: float = 1.0
    max_per_task: int = Field(default=4, ge=1, le=1000)


class Sft:
    """Minimises the cross-entropy of the assistant's tokens."""

    def __init__(self, settings: SftSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings = self._settings
        # In a thread: a row takes milliseconds, and there may be thousands.
        demonstrations = await asyncio.to_thread(self._rows, ctx, ctx.inputs.demonstrations)
        rows = [*demonstrations, *await self._successes(ctx)]
        held_out = await asyncio.to_thread(self._rows, ctx, ctx.inputs.validation_demonstrations)
        steps = settings.planned(len(rows))
        ctx.recorder.plan(steps)
        ctx.recorder.result(examples=float(len(rows)))
        step_settings = StepSettings(
            max_grad_norm=settings.max_grad_norm,
            explosion_factor=settings.explosion_factor,
            token_budget=settings.token_budget,
        )
        if held_out and not ctx.progress.step:
            loss = await ctx.policy.supervised_loss(held_out, settings=step_settings)
            ctx.recorder.result(validation_loss_before=loss)
            await ctx.recorder.end_step({"validation_loss": loss})
        while ctx.progress.step < steps or not ctx.progress.ended:
            # A run that was stopped within a step has trained it.
            metrics = await self._train(ctx, rows, step_settings) if ctx.progress.ended else {}
            if ctx.progress.step == steps:
                await ctx.policy.publish()
            ends = ctx.progress.step == steps or ctx.recorder.pauses
            if ctx.progress.step % settings.report_every == 0 or ends:
                if metrics:
                    ctx.recorder.result(loss=metrics["loss"])
                metrics["epoch"] = ctx.progress.step * settings.batch_size / len(rows)
                if held_out:
                    with ctx.recorder.spending("validate"):
                        loss = await ctx.policy.supervised_loss(held_out, settings=step_settings)
                    metrics["validation_loss"] = loss
                    ctx.recorder.result(validation_loss=loss)
                await ctx.recorder.end_step(metrics)
            else:
                await ctx.recorder.end_quiet_step()

    async def _train(self, ctx: RunContext, rows: Sequence[Row], settings: StepSettings) -> dict[str, float]:
        """Takes the next step; returns its metrics."""
        started = time.monotonic()
        batch = [rows[i] for i in self._settings.batch(ctx.progress.step, len(rows))]
        with ctx.recorder.spending("train"):
            result = await ctx.policy.train_supervised(batch, settings=settings)
            ctx.recorder.commit()
        tokens = sum(row.trained_tokens for row in batch)
        return {**result.as_metrics(), "tokens_per_second": tokens / max(time.monotonic() - started, 1e-9)}

    async def _successes(self, ctx: RunContext) -> list[Row]:
        """Builds rows of another run's successful rollouts, in feed order, without equal answers to a task.

        The rows have the sampled tokens if the policy's tokenizer maps them to the same text; else the conversation is
        tokenised again with the policy's chat template.

        Raises:
            RunFailed: if it has none.
        """
        name = ctx.run.inputs.get("rollouts")
        if not name:
            return []
        chosen: dict[str, str] = {}
        groups = []
        for group in await ctx.rollouts.of_run(name):
            passed = [r for r in group.rollouts if r.scored and (r.reward or 0.0) >= self._settings.min_reward]
            best = sorted(passed, key=lambda r: (-(r.reward or 0.0), r.name))[: self._settings.max_per_task]
            chosen |= {r.name: group.group_id for r in best}
            groups.append(replace(group, rollouts=tuple(best)))
        found = await ctx.rollouts.trajectories(groups)
        rows, again, left_out = await asyncio.to_thread(self._imitable, ctx, chosen, found)
        if not rows:
            minimum = self._settings.min_reward
            raise RunFailed(
                f"No rollout of {name} can be trained on: no complete one has a reward of at least {minimum:g}."
            )
        if not ctx.progress.step:
            how = (
                f" {again} of them were tokenised again, because the policy has a different tokenizer." if again else ""
            )
            how += "".join(f" {count} {reason}." for reason, count in left_out.items())
            ctx.notify("info", f"{len(chosen)} rollouts of {name} give {len(rows)} rows.{how}")
        return rows

    def _imitable(
        self, ctx: RunContext, chosen: Mapping[str, str], found: Mapping[str, RolloutTrajectory]
    ) -> tuple[list[Row], int, Mapping[str, int]]:
        """Builds the rows of rollouts by group; also returns how many had to be tokenised again, and what is left out why."""
        rows, seen, again = list[Row](), set[tuple[str, tuple[int, ...]]](), 0
        left_out, budget = Counter[str](), self._settings.token_budget
        for rollout, group_id in chosen.items():
            trajectory = found.get(rollout)
            if trajectory is None or trajectory.unusable:
                continue
            if trajectory.truncated:
                left_out["rollouts are left out because an answer was cut off at its token limit"] += 1
                continue
            made, retold = imitable_rows(ctx.policy.tokenizer, rollout, trajectory)
            again += retold
            short = within(made, budget)
            if len(short) < len(made):
                left_out[f"rows are left out because they are longer than token_budget = {budget}"] += len(made) - len(
                    short
                )
            fresh = [row for row in short if (group_id, row.token_ids) not in seen]
            seen |= {(group_id, row.token_ids) for row in fresh}
            rows += fresh
        return rows, again, left_out

    def _rows(self, ctx: RunContext, demonstrations: Sequence[Demonstration]) -> list[Row]:
        tokenizer = ctx.policy.tokenizer
        rows = []
        for number, demonstration in enumerate(demonstrations, start=1):
            try:
                row = sft_row(tokenizer, demonstration.messages, row_id=str(number), tools=demonstration.tools or None)
            except ValueError as error:
                raise RunFailed(f"Demonstration {number}: {error}") from error
            if len(row.token_ids) > self._settings.token_budget:
                raise RunFailed(f"Demonstration {number} has more tokens than token_budget.")
            rows.append(row)
        return rows


ENTRIES = (
    AlgorithmEntry(
        name="sft",
        settings=SftSettings,
        make=Sft,
        any_of=("demonstrations", "rollouts"),
        takes=("validation_demonstrations",),
    ),
)
