"""Direct preference optimisation: the better of two answers becomes likelier, the other less, near the first weights.

Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; with `loss = {kind = "ipo"}` Azar et al. 2023 (arXiv:2310.12036),
eq. 17. Of a rollout with several turns exactly the sampled tokens count.
"""

from collections.abc import Sequence

from fulmen_algorithm.algorithms.offline.answer_steps import (
    AnswerTrainer,
    Assessed,
    PairSettings,
    train_on_answers,
)
from fulmen_algorithm.algorithms.offline.answers import SOURCES, pairs_of, split
from fulmen_algorithm.algorithms.offline.preference_losses import PairLoss, SigmoidLoss, pair_slopes
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext


class DpoSettings(PairSettings):
    """Settings of `dpo`, in addition to those of every algorithm on pairs.

    Attributes:
        loss: Loss of a pair: `{kind = "sigmoid", beta = 0.1}` or `{kind = "ipo", beta = 0.1}`.
    """

    loss: PairLoss = SigmoidLoss()


class Dpo:
    """Learns which of two answers is better, from pairs in a data set or in stored groups (DPO, IPO)."""

    def __init__(self, settings: DpoSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Trains to the end and publishes; see `Algorithm`."""
        settings = self._settings
        pairs = await pairs_of(
            ctx,
            token_budget=settings.token_budget,
            pairs_per_group=settings.pairs_per_group,
            min_gap=settings.min_gap,
        )
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
                # An equal margin, as at the first step, counts as half.
                "accuracy": sum(0.5 if not m else float(m > 0) for m in margins) / len(margins),
                "margin_mean": settings.loss.beta * sum(margins) / len(margins),
                "chosen_ratio_mean": sum(m.ratio for m in measured[::2]) / len(margins),
                "rejected_ratio_mean": sum(m.ratio for m in measured[1::2]) / len(margins),
            }
            return Assessed(answers=answers, slopes=slopes.by_answer, metrics=metrics)

        await train_on_answers(ctx, settings, trainer, assess, count=len(train), held_out=len(held_out))


ENTRIES = (AlgorithmEntry(name="dpo", settings=DpoSettings, make=Dpo, any_of=SOURCES),)
