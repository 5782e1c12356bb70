"""A penalty by token (KL in the reward) is a part of the reward, wherever an estimator looks at it."""

import numpy as np
import pytest

from fulmen_algorithm.algorithms.scoring import ScoredRollout, Scorer
from fulmen_algorithm.losses.advantage_settings import (
    AdvantageSettings,
    GaeAdvantage,
    GroupAdvantage,
    ReinforcePpAdvantage,
    RlooAdvantage,
    ScoringSettings,
)
from fulmen_algorithm.rollouts.trajectory import TokenSequence

REWARDS = [1.0, 0.0, 0.5]
PENALTIES = [[[0.1, 0.2], [0.3]], [[-0.1], [0.4, 0.2]], [[0.0, 0.6], [0.2, 0.1]]]
"""By rollout, sequence and sampled token."""


def rollout(index: int) -> ScoredRollout:
    """Two sequences of a prompt token, an observation in between and what was sampled."""
    masks = [(False, *(True, False) * (len(row) - 1), True) for row in PENALTIES[index]]
    values = [iter(row) for row in PENALTIES[index]]
    return ScoredRollout(
        name=f"projects/default/rollouts/{index}",
        group="g",
        rewards={"reward": REWARDS[index]},
        role_rewards={},
        sequences=tuple(
            TokenSequence(token_ids=(5,) * len(m), loss_mask=m, logprobs=(0.0,) * len(m), policy_versions=(0,) * len(m))
            for m in masks
        ),
        penalties=tuple(
            tuple(next(own) if sampled else 0.0 for sampled in mask) for own, mask in zip(values, masks, strict=True)
        ),
    )


def advantages(advantage: AdvantageSettings) -> list[np.ndarray]:
    """What the sampled tokens of each rollout get, in order."""
    found = Scorer(ScoringSettings(advantage=advantage)).numbers([rollout(i) for i in range(3)])
    field = "rewards" if isinstance(advantage, GaeAdvantage) else "advantages"
    by_name: dict[str, list[float]] = {}
    for numbers in found:
        pairs = zip(getattr(numbers, field), numbers.sequence.loss_mask, strict=True)
        by_name.setdefault(numbers.rollout.name, []).extend(value for value, sampled in pairs if sampled)
    return [np.array(values) for values in by_name.values()]


def flat(index: int) -> np.ndarray:
    return np.array([value for row in PENALTIES[index] for value in row])


def test_estimators_that_compare_rollouts_take_the_sum_over_the_rollout():
    total = np.array([reward - flat(i).sum() for i, reward in enumerate(REWARDS)])
    for got, expected in zip(advantages(GroupAdvantage()), total - total.mean(), strict=True):
        assert got == pytest.approx(expected)
    for index, got in enumerate(advantages(RlooAdvantage())):
        assert got == pytest.approx(total[index] - np.delete(total, index).mean())


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_pp_has_the_penalty_at_its_token(baseline):
    # REINFORCE++: the return of a token is the reward minus what is taken from this token on.
    earned = np.array(REWARDS) - (np.mean(REWARDS) if baseline == "group" else 0.0)
    returns = [np.array([e - flat(i)[t:].sum() for t in range(len(flat(i)))]) for i, e in enumerate(earned)]
    everything = np.concatenate(returns)
    for got, own in zip(advantages(ReinforcePpAdvantage(baseline=baseline)), returns, strict=True):
        assert got == pytest.approx((own - everything.mean()) / everything.std(), rel=1e-4)


def test_a_critic_sees_token_rewards_with_the_penalty_taken_off():
    for index, got in enumerate(advantages(GaeAdvantage())):
        expected = -flat(index)
        expected[-1] += REWARDS[index]
        assert got == pytest.approx(expected)
