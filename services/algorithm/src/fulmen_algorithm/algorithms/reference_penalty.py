"""KL penalty in the reward: subtracts the divergence from the reference policy from each token's reward.

The penalty is coefficient * (log mu - log reference) of each sampled token, mu being the policy that sampled it: the k1
estimate of KL(mu || reference), unbiased however old mu is. Estimators that work by token (`reinforce_pp`, `gae`) have it
at its token; those that compare rollouts have the sum over the rollout.
"""

from collections.abc import Sequence
from dataclasses import replace

from fulmen_algorithm.algorithms.sampling import sequence_row
from fulmen_algorithm.algorithms.scoring import ScoredRollout
from fulmen_algorithm.losses.advantage_settings import ScoringSettings
from fulmen_algorithm.losses.objectives import Kl, RewardKl
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.settings import StepSettings


def penalty_conflict(kl: Kl, scoring: ScoringSettings) -> str:
    """Returns the reason why rewards cannot have the penalty; empty if they can."""
    if not isinstance(kl, RewardKl):
        return ""
    advantage = scoring.advantage.kind
    if advantage == "maxrl":
        return "kl: reward may make rewards negative, which maxrl cannot use"
    if scoring.rewards.normalise == "gdpo":
        return "kl: reward is not one of the reward dimensions, which gdpo normalises one by one"
    if advantage == "group" and scoring.credit.kind != "rollout":
        return f"kl: reward needs credit by rollout, or an estimator by token, not credit {scoring.credit.kind}"
    return ""


class ReferencePenalty:
    """Penalises the rollouts of a batch."""

    def __init__(self, ctx: RunContext, *, kl: RewardKl, settings: StepSettings) -> None:
        """`settings` have the temperature at which the rollouts were sampled."""
        self._ctx = ctx
        self._kl = kl
        self._settings = settings

    async def penalised(self, rollouts: Sequence[ScoredRollout]) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Computes the penalties of rollouts.

        Returns:
            The rollouts, and `kl_reference_sampler` (nats per token) and `kl_penalty_mean` (reward per rollout).
        """
        rows = [
            sequence_row(rollout.name, sequence, advantages=(0.0,) * len(sequence.token_ids))
            for rollout in rollouts
            for sequence in rollout.sequences
        ]
        reference = iter(await self._ctx.policy.reference_logprobs(rows, settings=self._settings))
        result, divergence = [], 0.0
        for rollout in rollouts:
            gaps = [sequence.gaps(next(reference)) for sequence in rollout.sequences]
            divergence += sum(map(sum, gaps))
            penalties = tuple(tuple(self._kl.coefficient * gap for gap in row) for row in gaps)
            result.append(replace(rollout, penalties=penalties))
        tokens = sum(row.trained_tokens for row in rows)
        return result, {
            "kl_reference_sampler": divergence / max(tokens, 1),
            "kl_penalty_mean": self._kl.coefficient * divergence / max(len(rollouts), 1),
        }
