"""A reward model: a scalar score of answers, learned from which of two answers is better.

Source: Bradley and Terry 1952, as in Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margins from Touvron et al. 2023
(arXiv:2307.09288), eq. 2; centring from Eisenstein et al. 2023 (arXiv:2312.09244), section 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import Field

from fulmen_algorithm.algorithms.offline.answer_steps import (
    Assessed,
    PairSettings,
    follow_rows,
    train_on_answers,
)
from fulmen_algorithm.algorithms.offline.answers import SOURCES, Answer, pairs_of, split
from fulmen_algorithm.algorithms.offline.preference_losses import log_sigmoid, sigmoid
from fulmen_algorithm.algorithms.score_rows import MARK, score_rows, score_tokens, scores_of
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.settings import StepResult


class RewardModelSettings(PairSettings):
    """Settings of `reward_model`, in addition to those of every algorithm on pairs.

    Attributes:
        margin: Margin between the scores of a pair, as a factor of the difference of its rewards; 0 for none. The rewards
            of a pair of `preferences` are 1 and 0.
        centring: Coefficient of the squared sum of the scores of a pair, which keeps their mean near 0; 0 for none.
    """

    margin: float = Field(default=0.0, ge=0)
    centring: float = Field(default=0.01, ge=0)

    @property
    def uses_reference(self) -> bool:
        """Scores are compared with no other weights."""
        return False

    @property
    def makes_reward_model(self) -> bool:
        """See `AlgorithmSettings`."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSlopes:
    """A mean loss, and its derivative by each score."""

    loss: float
    by_score: tuple[float, ...]


def score_slopes(pairs: Sequence[tuple[float, float]], margins: Sequence[float], *, centring: float) -> ScoreSlopes:
    """Computes the mean of -log sigmoid(r_c - r_r - margin) + centring (r_c + r_r)^2 of P pairs, in float64.

    Args:
        pairs: Scores, that of the better answer first.
        margins: Margin of each pair.
        centring: Coefficient of the squared sum.

    Returns:
        The loss, and the slopes of the 2 P scores in order.
    """
    total, slopes = 0.0, list[float]()
    for (chosen, rejected), margin in zip(pairs, margins, strict=True):
        distance, both = chosen - rejected - margin, chosen + rejected
        total += centring * both**2 - log_sigmoid(distance)
        pull = 2 * centring * both
        slopes += [pull - sigmoid(-distance), pull + sigmoid(-distance)]
    return ScoreSlopes(loss=total / len(pairs), by_score=tuple(slope / len(pairs) for slope in slopes))


class ScoreTrainer:
    """Scores answers and trains on them. Of an answer with several rows the last one is scored."""

    def __init__(self, ctx: RunContext, settings: RewardModelSettings) -> None:
        self._ctx = ctx
        self._settings = settings.step_settings
        self._tokens = score_tokens(ctx.policy.tokenizer)

    async def scores(self, answers: Sequence[Answer]) -> list[float]:
        """Computes the scores under the present weights."""
        rows = [row for answer in answers for row in score_rows(answer.rows[-1], self._tokens)]
        return scores_of(await self._ctx.policy.logprobs(rows, settings=self._settings))

    async def follow(self, answers: Sequence[Answer], slopes: Sequence[float]) -> StepResult:
        """Takes one optimiser step against the slopes of the loss by the scores."""
        rows = [
            row
            for answer, slope in zip(answers, slopes, strict=True)
            # The loss of a step is divided by its rows, two for each answer.
            for row in score_rows(answer.rows[-1], self._tokens, slope=-slope * 2 * len(answers))
        ]
        return await follow_rows(self._ctx, rows, self._settings)


class RewardModel:
    """Learns a scalar score of answers from pairs in a data set or in stored groups (Bradley-Terry)."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings, trainer = self._settings, ScoreTrainer(ctx, self._settings)
        pairs = await pairs_of(
            ctx,
            token_budget=settings.token_budget - MARK,
            pairs_per_group=settings.pairs_per_group,
            min_gap=settings.min_gap,
        )
        train, held_out = split(pairs, [p[0].group for p in pairs], share=settings.held_out, seed=settings.seed)
        examples = [*train, *held_out]

        async def assess(indices: Sequence[int]) -> Assessed:
            answers = [answer for i in indices for answer in examples[i]]
            scores = await trainer.scores(answers)
            found = list(zip(scores[::2], scores[1::2], strict=True))
            margins = [settings.margin * (examples[i][0].reward - examples[i][1].reward) for i in indices]
            slopes = score_slopes(found, margins, centring=settings.centring)
            gaps = [chosen - rejected for chosen, rejected in found]
            mean = fmean(scores)
            metrics = {
                "loss": slopes.loss,
                # Equal scores count as half.
                "accuracy": fmean(0.5 if not gap else float(gap > 0) for gap in gaps),
                "margin_mean": fmean(gaps),
                "score_mean": mean,
                "score_std": math.sqrt(fmean((score - mean) ** 2 for score in scores)),
            }
            return Assessed(answers=answers, slopes=slopes.by_score, metrics=metrics)

        await train_on_answers(ctx, settings, trainer, assess, count=len(train), held_out=len(held_out))


ENTRIES = (AlgorithmEntry(name="reward_model", settings=RewardModelSettings, make=RewardModel, any_of=SOURCES),)
