"""Adds the score of a trained reward model to the rewards of finished rollouts; see `model_rewards_settings`.

A rollout is scored once, by the last of its sequences that the policy sampled. The score is a dimension of the rewards,
so advantages, metrics and the record of what a step consumed see it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from fulmen_algorithm.algorithms.options.model_rewards_settings import RewardModelUse
from fulmen_algorithm.algorithms.sampling import supervised_rows
from fulmen_algorithm.algorithms.score_rows import MARK, score_rows, score_tokens, scores_of
from fulmen_algorithm.rollouts.groups import REWARD_MODEL, FinishedGroup, FinishedRollout
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import StepSettings


class ModelRewards:
    """The reward model of a run."""

    def __init__(self, ctx: RunContext, use: RewardModelUse, *, token_budget: int) -> None:
        """Rollouts that are longer than `token_budget`, with one more token, get no score."""
        self._ctx = ctx
        self._coefficient = use.coefficient
        # Scores are log-probabilities at temperature 1, whatever the policy samples at.
        self._settings = StepSettings(token_budget=token_budget)
        self._tokens = score_tokens(ctx.policy.tokenizer)
        self._scores: list[float] = []
        self._own: list[float] = []
        self._unscored = 0

    async def added(
        self, groups: Sequence[FinishedGroup], found: Mapping[str, RolloutTrajectory]
    ) -> list[FinishedGroup]:
        """Returns groups with the scores of their successful rollouts; one that cannot be scored has no reward.

        Args:
            groups: Finished groups.
            found: Trajectories by rollout.
        """
        rows = {
            rollout.name: row
            for group in groups
            for rollout in group.rollouts
            if rollout.succeeded and (row := self._row(rollout, found.get(rollout.name))) is not None
        }
        pairs = [each for row in rows.values() for each in score_rows(row, self._tokens)]
        logprobs = await self._ctx.policy.reward_logprobs(pairs, settings=self._settings) if pairs else []
        scores = dict(zip(rows, scores_of(logprobs), strict=True))
        return [
            replace(
                group, rollouts=tuple(self._scored(rollout, scores.get(rollout.name)) for rollout in group.rollouts)
            )
            for group in groups
        ]

    def end_step(self) -> dict[str, float]:
        """Returns the metrics of the rollouts since the last call.

        `reward_model_mean` and `reward_model_std` are of the scores, `reward_own_mean` is the mean reward of agent and
        grader, `reward_model_unscored` the number of rollouts that could not be scored.
        """
        metrics = {"reward_model_unscored": float(self._unscored)}
        if self._scores:
            metrics |= {"reward_model_mean": fmean(self._scores), "reward_model_std": pstdev(self._scores)}
        if self._own:
            metrics["reward_own_mean"] = fmean(self._own)
        self._scores, self._own, self._unscored = [], [], 0
        return metrics

    def _row(self, rollout: FinishedRollout, trajectory: RolloutTrajectory | None) -> Row | None:
        rows = supervised_rows(rollout.name, trajectory, policy=self._ctx.run.policy.name)
        if not rows or len(rows[-1].token_ids) + MARK > self._settings.token_budget:
            return None
        return rows[-1]

    def _scored(self, rollout: FinishedRollout, score: float | None) -> FinishedRollout:
        if not rollout.succeeded:
            return rollout
        total = math.nan if score is None else (rollout.reward or 0.0) + self._coefficient * score
        # A model whose weights are not finite scores nothing.
        if score is None or not math.isfinite(total):
            self._unscored += 1
            return replace(rollout, reward=None, rewards={})
        self._scores.append(score)
        self._own += [rollout.reward] if rollout.reward is not None else []
        return replace(rollout, reward=total, rewards={**rollout.all_rewards, (REWARD_MODEL, None, b""): score})
