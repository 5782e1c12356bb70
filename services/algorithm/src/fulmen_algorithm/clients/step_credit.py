"""Credit by step, as the SDK gives it, for the calls of one trajectory."""

from collections.abc import Mapping
from dataclasses import dataclass

from fulmen.agent import RewardKey
from fulmen.trajectories import (
    AttemptReward,
    CreditOption,
    CreditSettings,
    Trajectory,
    assign_credit,
    attach,
    unit_rewards,
)
from fulmen_algorithm.rollouts.trajectory import CallCredits, CreditRule


@dataclass(frozen=True, slots=True)
class StepCredit:
    """See `rollouts.trajectory.CreditOf`; it keeps the calls' records in memory until it is released."""

    trajectory: Trajectory

    def __call__(self, rewards: Mapping[RewardKey, float], rule: CreditRule) -> CallCredits:
        """Gives credit; a reward that scores none of the calls counts nothing."""
        given = [
            AttemptReward(value=value, dimension=dimension, step=step, span_id=span_id)
            for (dimension, step, span_id), value in rewards.items()
        ]
        scored = attach(self.trajectory, given)
        settings = CreditSettings(option=CreditOption(rule.option), gamma=rule.gamma, weights=rule.weights)
        rows = assign_credit(scored, settings).rows
        return CallCredits(
            credits=tuple(tuple(credit or 0.0 for credit in row.credits) for row in rows),
            rewards=unit_rewards(scored, rule.weights).rewards,
        )
