"""The losses of answers are those of their papers, and the slopes their derivatives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.algorithms.offline.preference_losses import (
    IpoLoss,
    Measured,
    SigmoidLoss,
    pair_slopes,
    single_slopes,
)

# Powers of two keep the finite differences exact enough.
STEP = 2.0**-14


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def dpo(ratios: np.ndarray, tokens: np.ndarray, beta: float, flipped: float) -> float:
    """Eq. 7 of arXiv:2305.18290; `ratios` and `tokens` have the shape [P, 2], the chosen answer first."""
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    return float(-((1 - flipped) * np.log(sigmoid(margin)) + flipped * np.log(sigmoid(-margin))).mean())


def ipo(ratios: np.ndarray, tokens: np.ndarray, beta: float, flipped: float) -> float:
    """Eq. 17 of arXiv:2310.12036, of means per token."""
    mean = ratios / tokens
    return float(((mean[:, 0] - mean[:, 1] - 1 / (2 * beta)) ** 2).mean())


def kto(ratios: np.ndarray, good: np.ndarray, z: float, beta: float, weights: tuple[float, float]) -> float:
    """Eq. 7 and 8 of arXiv:2402.01306, lambda minus value."""
    weight = np.where(good, *weights)
    value = weight * np.where(good, sigmoid(beta * (ratios - z)), sigmoid(beta * (z - ratios)))
    return float((weight - value).mean())


RATIOS = st.lists(st.tuples(*[st.floats(-20, 20)] * 2, *[st.integers(1, 9)] * 2), min_size=1, max_size=5)


@given(found=RATIOS, beta=st.floats(0.01, 0.5), flipped=st.floats(0, 0.45), kind=st.sampled_from(["sigmoid", "ipo"]))
def test_the_loss_of_pairs_and_its_slopes_are_those_of_the_paper(found, beta, flipped, kind):
    loss = SigmoidLoss(beta=beta, label_smoothing=flipped) if kind == "sigmoid" else IpoLoss(kind="ipo", beta=beta)
    formula = dpo if kind == "sigmoid" else ipo
    ratios = np.array([each[:2] for each in found])
    tokens = np.array([each[2:] for each in found])
    pairs = [
        (Measured(ratio=a, tokens=m), Measured(ratio=b, tokens=n))
        for (a, b), (m, n) in zip(ratios.tolist(), tokens.tolist(), strict=True)
    ]

    slopes = pair_slopes(pairs, loss)

    assert slopes.loss == pytest.approx(formula(ratios, tokens, beta, flipped), abs=1e-9)
    for index, slope in enumerate(slopes.by_answer):
        nudge = np.zeros_like(ratios)
        nudge.flat[index] = STEP
        rise = formula(ratios + nudge, tokens, beta, flipped) - formula(ratios - nudge, tokens, beta, flipped)
        assert slope == pytest.approx(rise / (2 * STEP), rel=1e-5, abs=1e-6)


@given(
    ratios=st.lists(st.floats(-20, 20), min_size=1, max_size=6), z=st.floats(0, 5), beta=st.floats(0.01, 0.5),
    weights=st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), data=st.data(),
)  # fmt: skip
def test_the_loss_of_single_answers_and_its_slopes_are_those_of_the_paper(ratios, z, beta, weights, data):
    good = np.array(data.draw(st.lists(st.booleans(), min_size=len(ratios), max_size=len(ratios))))
    answers = [(Measured(ratio=r, tokens=3), bool(g)) for r, g in zip(ratios, good, strict=True)]

    slopes = single_slopes(answers, divergence=z, beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])

    at = np.array(ratios)
    assert slopes.loss == pytest.approx(kto(at, good, z, beta, weights), abs=1e-9)
    for index, slope in enumerate(slopes.by_answer):
        nudge = np.zeros_like(at)
        nudge[index] = STEP
        rise = kto(at + nudge, good, z, beta, weights) - kto(at - nudge, good, z, beta, weights)
        assert slope == pytest.approx(rise / (2 * STEP), rel=1e-5, abs=1e-6)


def test_a_margin_beyond_any_exponent_is_finite():
    far = pair_slopes([(Measured(ratio=-1e6, tokens=1), Measured(ratio=1e6, tokens=1))], SigmoidLoss(beta=1.0))
    assert far.loss == pytest.approx(2e6)
    assert far.by_answer == (-1.0, 1.0)
