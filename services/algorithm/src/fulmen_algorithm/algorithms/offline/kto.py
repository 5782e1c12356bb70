"""Kahneman-Tversky optimisation: learns from single answers that are desirable or not; no pairs are needed.

Source: Ethayarajh et al. 2024 (arXiv:2402.01306), eq. 7 and 8. The divergence z is estimated as in the paper's section
4.1: the mean of r over the batch's prompts with the answers of other prompts, not below 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from fulmen_algorithm.algorithms.offline.answer_steps import (
    AnswerSettings,
    AnswerTrainer,
    Assessed,
    train_on_answers,
)
from fulmen_algorithm.algorithms.offline.answers import (
    SOURCES,
    Answer,
    answers_of,
    preferred_pairs,
    split,
    stored_groups,
)
from fulmen_algorithm.algorithms.offline.preference_losses import single_slopes
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.rows import NO_VERSION, Row


class KtoSettings(AnswerSettings):
    """Settings of `kto`, in addition to those of every algorithm on answers.

    Attributes:
        threshold: Stored rollouts with at least this reward are desirable.
        beta: Strength of the tie to the reference policy.
        desirable_weight: Weight of desirable answers; the paper balances both weights so that weight times number is
            about equal.
        undesirable_weight: Weight of undesirable answers.
    """

    threshold: float = 0.5
    beta: float = Field(default=0.1, gt=0)
    desirable_weight: float = Field(default=1.0, gt=0)
    undesirable_weight: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _prompts_have_other_answers(self) -> Self:
        if self.batch_size < 2:
            raise ValueError(
                "batch_size: must be 2 or more, because each prompt is also measured with the answer to another prompt"
            )
        return self


class Kto:
    """Learns from single answers, desirable or not by their reward, without pairs (KTO)."""

    def __init__(self, settings: KtoSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings = self._settings
        answers = await self._answers(ctx)
        train, held_out = split(answers, [a.group for a in answers], share=settings.held_out, seed=settings.seed)
        examples, trainer = [*train, *held_out], AnswerTrainer(ctx, settings)

        async def assess(indices: Sequence[int]) -> Assessed:
            batch = [examples[i] for i in indices]
            swapped = mismatched(batch, token_budget=settings.token_budget)
            measured = await trainer.measure([*batch, *swapped])
            own, others = measured[: len(batch)], measured[len(batch) :]
            divergence = max(0.0, sum(m.ratio for m in others) / max(len(others), 1))
            wanted = [answer.reward >= settings.threshold for answer in batch]
            slopes = single_slopes(
                list(zip(own, wanted, strict=True)),
                divergence=divergence,
                beta=settings.beta,
                desirable_weight=settings.desirable_weight,
                undesirable_weight=settings.undesirable_weight,
            )
            right = [
                0.5 if m.ratio == divergence else float((m.ratio > divergence) == w)
                for m, w in zip(own, wanted, strict=True)
            ]
            metrics = {
                "loss": slopes.loss,
                "accuracy": sum(right) / len(right),
                "divergence": divergence,
                "desirable_share": sum(wanted) / len(wanted),
            }
            return Assessed(answers=batch, slopes=slopes.by_answer, metrics=metrics)

        await train_on_answers(ctx, settings, trainer, assess, count=len(train), held_out=len(held_out))

    async def _answers(self, ctx: RunContext) -> list[Answer]:
        """Returns the answers of all inputs; of a pair the chosen one is desirable and the other is not.

        Raises:
            RunFailed: if all are desirable, or none is.
        """
        settings = self._settings
        stored = await answers_of(ctx, await stored_groups(ctx), token_budget=settings.token_budget)
        pairs = await preferred_pairs(ctx, token_budget=settings.token_budget)
        # A pair has its verdict, whatever the threshold of rewards.
        told = [
            replace(answer, reward=verdict)
            for pair in pairs
            for answer, verdict in zip(pair, (settings.threshold, settings.threshold - 1), strict=True)
        ]
        answers = [*told, *stored.values()]
        good = sum(answer.reward >= settings.threshold for answer in answers)
        if not 0 < good < len(answers):
            raise RunFailed(
                f"{good} of {len(answers)} usable answers have a reward of {settings.threshold:g} or more (threshold); "
                "there must be some above and some below."
            )
        ctx.recorder.result(desirable=float(good), undesirable=float(len(answers) - good))
        return answers


def mismatched(batch: Sequence[Answer], *, token_budget: int) -> list[Answer]:
    """Gives each prompt of a batch the answer of the next one; of several rows the first.

    Pairs that are longer than the budget are left out.
    """
    found = []
    for own, other in zip(batch, [*batch[1:], *batch[:1]], strict=True):
        prompt, answer = own.rows[0], other.rows[0]
        head, tail = prompt.loss_mask.index(True), answer.loss_mask.index(True)
        token_ids = (*prompt.token_ids[:head], *answer.token_ids[tail:])
        if len(token_ids) > token_budget:
            continue
        name, zeros = f"{own.name} + {other.name}", (0.0,) * len(token_ids)
        row = Row(
            rollout_id=name,
            token_ids=token_ids,
            loss_mask=(*prompt.loss_mask[:head], *answer.loss_mask[tail:]),
            old_logprobs=zeros,
            advantages=zeros,
            policy_versions=(NO_VERSION,) * len(token_ids),
            role=prompt.role,
        )
        found.append(Answer(name=name, group=own.group, rows=(row,), reward=0.0))
    return found


ENTRIES = (AlgorithmEntry(name="kto", settings=KtoSettings, make=Kto, any_of=SOURCES, single_scores=True),)
