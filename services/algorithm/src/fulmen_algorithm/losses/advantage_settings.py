"""Settings of rewards and advantages. Importable without torch."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fulmen_algorithm.training.strict import AUTO_BY_NAME, NONE_BY_NAME, Strict

OVERLONG = "overlong"
"""Name of the penalty for length in metrics and credit; no reward may have it."""
UNWEIGHTED = ""
"""Name of a reward whose weight is 1, whatever the dimensions weigh; no dimension has it."""
OVERLONG_BUFFER = 5


class GroupAdvantage(Strict):
    """The reward minus the group's mean: GRPO (arXiv:2402.03300), without division Dr. GRPO (arXiv:2503.20783).

    Attributes:
        std: Divisor: none, the standard deviation of the group, or the standard deviation of the batch.
    """

    kind: Literal["group"] = "group"
    std: Literal["none", "group", "batch"] = "none"


class RlooAdvantage(Strict):
    """The reward minus the mean of the group's other rollouts: RLOO (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class ReinforcePpAdvantage(Strict):
    """Token returns, whitened over the batch: REINFORCE++ (arXiv:2501.03262).

    Attributes:
        baseline: `none`, or `group` to subtract the group's mean first (REINFORCE++-baseline).
        gamma: Discount by token.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    gamma: float = Field(default=1.0, gt=0, le=1)


class OpoAdvantage(Strict):
    """The reward minus the group's length-weighted mean, the baseline of least variance: OPO (arXiv:2505.23585)."""

    kind: Literal["opo"] = "opo"


class MaxRlAdvantage(Strict):
    """The reward relative to the group's mean, (R - mean) / mean: maximum likelihood RL; for rewards of at least 0."""

    kind: Literal["maxrl"] = "maxrl"


class GaeAdvantage(Strict):
    """Generalised advantage estimates of PPO from a critic (arXiv:1506.02438), whitened over the batch.

    Attributes:
        gamma: Discount by token.
        lam: lambda, decay of the temporal differences by token.
        whiten: Whether the batch's advantages are scaled to mean 0 and standard deviation 1.
    """

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    whiten: bool = True


class NoAdvantage(Strict):
    """Rewards are not used, and a rollout needs none; a teacher provides the signal."""

    kind: Literal["none"] = "none"


AdvantageSettings = Annotated[
    GroupAdvantage | RlooAdvantage | ReinforcePpAdvantage | OpoAdvantage | MaxRlAdvantage | GaeAdvantage | NoAdvantage,
    Field(discriminator="kind"),
]


class RewardSettings(Strict):
    """Dimensions of the reward and their weights.

    Attributes:
        weights: Weight by dimension; a rollout without one of them is left out. None: the dimension `reward` with
            weight 1, or the only dimension if there is no `reward`.
        normalise: `gdpo` normalises every dimension within its group before they are added (GDPO, arXiv:2601.05242), so
            that one with a wide range does not dominate the others.
    """

    weights: dict[str, float] | None = None
    normalise: Literal["none", "gdpo"] = "none"

    @model_validator(mode="after")
    def _check(self) -> "RewardSettings":
        if self.weights is not None:
            if not self.weights:
                raise ValueError("weights must name at least one dimension")
            if OVERLONG in self.weights:
                raise ValueError(f"{OVERLONG} is reserved for the length penalty")
            if UNWEIGHTED in self.weights:
                raise ValueError("a dimension has no name")
            if wrong := [name for name, weight in self.weights.items() if not math.isfinite(weight)]:
                raise ValueError(f"the weight of {', '.join(wrong)} is not a finite number")
        elif self.normalise == "gdpo":
            raise ValueError("gdpo needs weights for the dimensions")
        return self


class OverlongSettings(Strict):
    """Soft penalty for length: DAPO (arXiv:2503.14476) equation 13.

    Attributes:
        max_tokens: L_max, sampled tokens of a rollout beyond which the full penalty applies.
        buffer_tokens: L_cache, tokens before L_max over which the penalty grows linearly.
        penalty: Amount subtracted from the reward beyond L_max.
    """

    max_tokens: int = Field(ge=1)
    buffer_tokens: int = Field(ge=1)
    penalty: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "OverlongSettings":
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens is larger than max_tokens")
        return self

    def reward(self, tokens: int) -> float:
        """Computes the reward of a length: 0 up to L_max - L_cache, -penalty beyond L_max, linear in between."""
        over = tokens - (self.max_tokens - self.buffer_tokens)
        return -self.penalty * min(1.0, over / self.buffer_tokens) if over > 0 else 0.0


class Overlong(Strict):
    """Soft penalty for length, with defaults from the run's `max_tokens`.

    Attributes:
        max_tokens: L_max; null for the run's `max_tokens`, the maximum length of the answer to one call. Set it if a
            rollout makes several calls.
        buffer_tokens: L_cache; null for a fifth of L_max (4096 of 20480 tokens in the paper).
        penalty: Amount subtracted from the reward beyond L_max.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    buffer_tokens: int | None = Field(default=None, ge=1)
    penalty: float = Field(default=1.0, gt=0)

    def settings(self, longest_answer: int) -> OverlongSettings:
        """Fills in defaults.

        Raises:
            ValueError: if the buffer is larger than L_max.
        """
        longest = self.max_tokens or longest_answer
        buffer = self.buffer_tokens or max(1, longest // OVERLONG_BUFFER)
        return OverlongSettings(max_tokens=longest, buffer_tokens=buffer, penalty=self.penalty)


class RolloutCredit(Strict):
    """One advantage for all tokens of a rollout."""

    kind: Literal["rollout"] = "rollout"


class StepReturnCredit(Strict):
    """One advantage per call, from the rewards of steps (docs/trajectories.md).

    Attributes:
        option: Credit of a call: `discounted` (return), `per_step`, `last_step` or `split`.
        gamma: Discount by step; only for `discounted`.
        baseline: `group` centres credit over all steps of the group, `step` over the steps with the same number; a
            step that only one rollout reached is centred over the group.
    """

    kind: Literal["step_return"] = "step_return"
    option: Literal["discounted", "per_step", "last_step", "split"] = "discounted"
    gamma: float = Field(default=1.0, gt=0, le=1)
    baseline: Literal["group", "step"] = "group"

    @model_validator(mode="after")
    def _check(self) -> "StepReturnCredit":
        if self.option != "discounted" and self.gamma != 1.0:
            raise ValueError("gamma needs option discounted")
        return self


class StepGroupsCredit(Strict):
    """The rollout's advantage plus the advantage of each step among steps from the same state: GiGPO
    (arXiv:2505.10978).

    Steps of a group have the same state if the same agent read the same new tokens before them.

    Attributes:
        gamma: Discount of the returns by step.
        weight: omega, weight of the advantage of steps.
    """

    kind: Literal["step_groups"] = "step_groups"
    gamma: float = Field(default=0.95, gt=0, le=1)
    weight: float = Field(default=1.0, gt=0)


CreditSettings = Annotated[RolloutCredit | StepReturnCredit | StepGroupsCredit, Field(discriminator="kind")]


class RoleSettings(Strict):
    """Roles that train, with their baselines and rewards.

    Attributes:
        train: Roles (agent names) that train; empty for all.
        baseline: `group`: one advantage per rollout for all roles. `role`: one per role, over the rollouts of the group
            in which it took part.
        rewards: Reward dimension by role, instead of the common reward; needs the baseline `role`.
    """

    train: tuple[str, ...] = Field(default=(), strict=False)
    baseline: Literal["group", "role"] = "group"
    rewards: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "RoleSettings":
        if self.rewards and self.baseline != "role":
            raise ValueError("rewards of roles need baseline role")
        if self.train and (unknown := sorted(set(self.rewards) - set(self.train))):
            raise ValueError(f"the roles {', '.join(unknown)} have rewards but do not train")
        return self


class CriticSettings(Strict):
    """The critic of PPO: a copy of the policy's trunk with a value head, trained together with it.

    Attributes:
        learning_rate: Constant learning rate of the critic's AdamW; `"auto"` chooses it by the size of the model.
        clip: Distance of a value from its value at the start of the batch beyond which its loss is clipped (PPO2);
            `"none"` for no clipping.
        max_grad_norm: Maximum global norm of the gradients, to which larger ones are scaled down.
    """

    learning_rate: Annotated[float | None, AUTO_BY_NAME] = Field(default=None, gt=0, le=1)
    clip: Annotated[float | None, NONE_BY_NAME] = Field(default=0.2, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class CriticPlan(Strict):
    """Settings of a trainer's critic.

    Attributes:
        critic: Settings of the critic.
        advantage: Settings of the advantages.
    """

    critic: CriticSettings = Field(default_factory=CriticSettings)
    advantage: GaeAdvantage = Field(default_factory=GaeAdvantage)


class ScoringSettings(Strict):
    """All settings of rewards and advantages, checked against each other.

    Attributes:
        advantage: The estimator.
        rewards: Dimensions of the reward.
        overlong: Penalty for length; None for none.
        credit: By rollout or by step.
        roles: Agents of several roles.
    """

    advantage: AdvantageSettings = Field(default_factory=GroupAdvantage)
    rewards: RewardSettings = Field(default_factory=RewardSettings)
    overlong: OverlongSettings | None = None
    credit: CreditSettings = Field(default_factory=RolloutCredit)
    roles: RoleSettings = Field(default_factory=RoleSettings)

    @model_validator(mode="after")
    def _check(self) -> "ScoringSettings":
        check_scoring(self.advantage, self.rewards, self.credit, self.roles)
        return self


_BY_STEP = {"step_return": ("group", "reinforce_pp", "gae"), "step_groups": ("group",)}


def check_scoring(
    advantage: AdvantageSettings, rewards: RewardSettings, credit: CreditSettings, roles: RoleSettings
) -> None:
    """Checks settings against each other.

    Raises:
        ValueError: if they are inconsistent; the text names them.
    """
    kind = advantage.kind
    if rewards.normalise == "gdpo" and (kind != "group" or credit.kind != "rollout" or roles.rewards):
        raise ValueError("gdpo needs the advantage group, credit by rollout, and no rewards of roles")
    if credit.kind != "rollout" and kind not in _BY_STEP[credit.kind]:
        raise ValueError(f"credit {credit.kind} needs the advantage {' or '.join(_BY_STEP[credit.kind])}, not {kind}")
    if credit.kind == "step_return" and kind != "group" and credit != StepReturnCredit():
        raise ValueError(
            f"with {kind} credit step_return has no settings: the advantage has the discount and the baseline"
        )
    if credit.kind != "rollout" and isinstance(advantage, ReinforcePpAdvantage) and advantage.baseline == "group":
        raise ValueError("credit by step has no baseline group of reinforce_pp")
    if credit.kind != "rollout" and roles.rewards:
        raise ValueError("rewards of roles need credit by rollout")
    if kind == "none" and (roles.baseline == "role" or rewards.weights is not None):
        raise ValueError("advantage none uses no rewards, so it has no baseline of roles and no weights of dimensions")
    if kind == "gae" and roles.baseline == "role":
        raise ValueError("the baseline of gae is its critic, not the baseline of roles")
