"""Settings of a trained reward model that scores the rollouts of a run. Importable without torch."""

from pydantic import Field

from fulmen_algorithm.losses.advantage_settings import ScoringSettings
from fulmen_algorithm.rollouts.groups import REWARD_MODEL
from fulmen_algorithm.training.strict import Strict


class RewardModelUse(Strict):
    """A reward model, a version that `reward_model` has trained, whose score is added to the reward of each rollout.

    Attributes:
        model: The version, `<policy>@<number>`, of the run's project. It must have the tokenizer of the policy.
        coefficient: Weight of the score beside the rewards of agent and grader, whose sum is the reward. With
            `rewards.weights` the weight of the dimension `reward_model` counts instead.
    """

    model: str = Field(pattern=r"^[a-z0-9._-]{1,63}@[1-9][0-9]{0,17}$")
    coefficient: float = Field(default=1.0, gt=0)

    @property
    def resource(self) -> str:
        """Name of the version, `resources/...`."""
        policy, _, number = self.model.partition("@")
        return f"resources/policy.{policy}/versions/{number}"


def reward_model_conflict(use: RewardModelUse | None, scoring: ScoringSettings) -> str:
    """Returns every reason why the rewards of a run cannot have the score; empty if they can."""
    weights = scoring.rewards.weights
    if use is None:
        return ""
    found = []
    if scoring.credit.kind != "rollout":
        found.append(f"reward_model: scores whole rollouts, which credit {scoring.credit.kind} splits")
    if scoring.roles.rewards:
        found.append("reward_model: scores whole rollouts, and roles.rewards has rewards of single roles")
    if weights is not None and REWARD_MODEL not in weights:
        found.append(f"reward_model: rewards.weights has no {REWARD_MODEL}, the dimension of its score")
    return "; ".join(found)
