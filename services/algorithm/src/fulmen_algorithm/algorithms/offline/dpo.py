"""Direct preference optimisation: the better of two answers becomes likelier, the other less, near the first weights.

Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; with `loss = {kind = "ipo"}` Azar et al. 2023 (arXiv:2310.12036),
eq. 17. Of a rollout with several turns exactly the sampled tokens count.
"""

from collections.abc import Sequence

from pydantic import Field

from fulmen_algorithm.algorithms.offline.answer_steps import (
    AnswerSettings,
    AnswerTrainer,
    Assessed,
    train_on_answers,
)
from fulmen_algorithm.algorithms.offline.answers import (
    SOURCES,
    Pair,
    answers_of,
    best_against_worst,
    preferred_pairs,
    split,
    stored_groups,
)
from fulmen_algorithm.algorithms.offline.preference_losses import PairLoss, SigmoidLoss, pair_slopes
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed


class DpoSettings(AnswerSettings):
    """Settings of `dpo`, in addition to those of every algorithm on answers.

    Attributes:
        loss: Loss of a pair: `{kind = "sigmoid", beta = 0.1}` or `{kind = "ipo", beta = 0.1}`.
        pairs_per_group: Maximum number of pairs of a group of stored rollouts: the best and the worst, the second best
            and the second worst, and so on.
        min_gap: Minimum difference between the rewards of a pair of stored rollouts.
    """

    loss: PairLoss = SigmoidLoss()
    pairs_per_group: int = Field(default=1, ge=1, le=500)
    min_gap: float = Field(default=1e-6, gt=0)


class Dpo:
    """Learns from pairs of answers, of a data set or of stored groups, which of two answers is better (DPO, IPO)."""

    def __init__(self, settings: DpoSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings = self._settings
        pairs = await self._pairs(ctx)
        train, held_out = split(pairs, [p[0].group for p in pairs], share=settings.held_out, seed=settings.seed)
        examples, trainer = [*train, *held_out], AnswerTrainer(ctx, settings)

        async def assess(indices: Sequence[int]) -> Assessed:
            answers = [answer for i in indices for answer in examples[i]]
            measured = await trainer.measure(answers)
            found = list(zip(measured[::2], measured[1::2], strict=True))
            slopes = pair_slopes(found, settings.loss)
            margins = [chosen.ratio - rejected.ratio for chosen, rejected in found]
            metrics = {
                "loss": slopes.loss,
                # An equal margin, as at the first step, says as little as a coin.
                "accuracy": sum(0.5 if not m else float(m > 0) for m in margins) / len(margins),
                "margin_mean": settings.loss.beta * sum(margins) / len(margins),
                "chosen_ratio_mean": sum(m.ratio for m in measured[::2]) / len(margins),
                "rejected_ratio_mean": sum(m.ratio for m in measured[1::2]) / len(margins),
            }
            return Assessed(answers=answers, slopes=slopes.by_answer, metrics=metrics)

        await train_on_answers(ctx, settings, trainer, assess, count=len(train), held_out=len(held_out))

    async def _pairs(self, ctx: RunContext) -> list[Pair]:
        """Returns the pairs of all inputs.

        Raises:
            RunFailed: if there are none.
        """
        settings = self._settings
        groups = await stored_groups(ctx)
        answers = await answers_of(ctx, groups, token_budget=settings.token_budget)
        stored = best_against_worst(answers, pairs_per_group=settings.pairs_per_group, min_gap=settings.min_gap)
        pairs = [*await preferred_pairs(ctx, token_budget=settings.token_budget), *stored]
        if not pairs:
            raise RunFailed(
                f"There is no pair to learn from: in none of {len(groups)} stored groups do the rewards of two usable "
                f"rollouts differ by min_gap ({settings.min_gap:g})."
            )
        if groups and not ctx.progress.step:
            ctx.notify("info", f"{len(groups)} stored groups give {len(stored)} pairs.")
        return pairs


ENTRIES = (AlgorithmEntry(name="dpo", settings=DpoSettings, make=Dpo, any_of=SOURCES),)
