"""Losses of answers by how much more likely they are than under the reference policy; pure, in float64.

With r(y) = log pi(y) - log pi_ref(y), both sums over the sampled tokens of an answer:

- DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7): -log sigmoid(beta (r(chosen) - r(rejected))). With label smoothing
  e, which assumes that a share e of the preferences is the wrong way round (its appendix on conservative DPO by Mitchell
  2023): -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m).
- IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17): (m - 1 / (2 beta))^2, where m is the difference of the means per
  token, as TRL has it and as its authors computed the figures of the paper.
- KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8): weight (1 - sigmoid(beta (r - z))) of a desirable answer,
  weight (1 - sigmoid(beta (z - r))) of an undesirable one; z, the divergence from the reference, has no gradient.

The slopes are the derivatives of the mean loss by log pi of each token of an answer. All tokens of an answer have the
same one, so a training step needs a pass that measures r and one that follows the slopes, whatever the micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.training.strict import Strict


class SigmoidLoss(Strict):
    """The loss of DPO. Source: arXiv:2305.18290, eq. 7.

    Attributes:
        beta: Strength of the tie to the reference policy.
        label_smoothing: Share of preferences that are assumed to be reversed.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)


class IpoLoss(Strict):
    """The loss of IPO, whose margin stays finite even if all preferences agree. Source: arXiv:2310.12036, eq. 17.

    Attributes:
        beta: Strength of the tie to the reference policy.
    """

    kind: Literal["ipo"]
    beta: float = Field(default=0.1, gt=0)


PairLoss = Annotated[SigmoidLoss | IpoLoss, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An answer under the present weights.

    Attributes:
        ratio: r, its log-probability minus that under the reference, in nats.
        tokens: Number of sampled tokens.
    """

    ratio: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """A mean loss, and its derivative by the log-probability of each token of each answer."""

    loss: float
    by_answer: tuple[float, ...]


def pair_slopes(pairs: Sequence[tuple[Measured, Measured]], loss: PairLoss) -> Slopes:
    """Computes the mean loss of P pairs, the chosen answer first; the slopes are those of the 2 P answers in order."""
    total, slopes = 0.0, list[float]()
    for chosen, rejected in pairs:
        match loss:
            case SigmoidLoss(beta=beta, label_smoothing=flipped):
                margin = beta * (chosen.ratio - rejected.ratio)
                total -= (1 - flipped) * log_sigmoid(margin) + flipped * log_sigmoid(-margin)
                slope = beta * (flipped * sigmoid(margin) - (1 - flipped) * sigmoid(-margin))
                slopes += [slope, -slope]
            case IpoLoss(beta=beta):
                excess = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * beta)
                total += excess**2
                slopes += [2 * excess / chosen.tokens, -2 * excess / rejected.tokens]
    return Slopes(loss=total / len(pairs), by_answer=tuple(slope / len(pairs) for slope in slopes))


def single_slopes(
    answers: Sequence[tuple[Measured, bool]],
    *,
    divergence: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Slopes:
    """Computes the mean loss of N answers.

    Args:
        answers: Each with whether it is desirable.
        divergence: z, at least 0.
        beta: Strength of the tie to the reference policy.
        desirable_weight: Weight of desirable answers.
        undesirable_weight: Weight of the others.
    """
    total, slopes = 0.0, list[float]()
    for answer, desirable in answers:
        weight, sign = (desirable_weight, 1.0) if desirable else (undesirable_weight, -1.0)
        value = sigmoid(sign * beta * (answer.ratio - divergence))
        total += weight * (1 - value)
        slopes.append(-sign * weight * beta * value * (1 - value))
    return Slopes(loss=total / len(answers), by_answer=tuple(slope / len(answers) for slope in slopes))


def sigmoid(x: float) -> float:
    """Computes 1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x: float) -> float:
    """Computes log(1 / (1 + exp(-x))) without overflow."""
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))
