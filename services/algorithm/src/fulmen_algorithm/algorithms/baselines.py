"""Variants of `grpo` with another baseline: the same loop and settings, other defaults."""

from pydantic import Field

from fulmen_algorithm.algorithms.grpo import Grpo, GrpoSettings
from fulmen_algorithm.losses.advantage_settings import (
    AdvantageSettings,
    GaeAdvantage,
    ReinforcePpAdvantage,
    RlooAdvantage,
)
from fulmen_algorithm.losses.objectives import ClipLoss, Loss, ReinforceLoss
from fulmen_algorithm.runs.algorithm import AlgorithmEntry


class RlooSettings(GrpoSettings):
    """Settings of `rloo` (arXiv:2402.14740): the others of the group are the baseline, the gradient is REINFORCE's.

    The paper takes one optimiser step for each batch, for which alone that gradient is right.
    """

    advantage: AdvantageSettings = RlooAdvantage()
    loss: Loss = ReinforceLoss()
    minibatches: int = Field(default=1, ge=1, le=1000)


class ReinforcePpSettings(GrpoSettings):
    """Settings of `reinforce_pp` (arXiv:2501.03262): token returns, whitened over the batch, under the clipped loss.

    Attributes:
        group_size: One rollout of each task, because rollouts are not compared within their group; with the baseline
            `group` at least two.
    """

    advantage: AdvantageSettings = ReinforcePpAdvantage()
    loss: Loss = ClipLoss(high=0.2)
    group_size: int = Field(default=1, ge=1, le=1000)


class PpoSettings(GrpoSettings):
    """Settings of `ppo` (arXiv:1707.06347): a critic learns what to expect, and GAE makes the advantages.

    Attributes:
        group_size: One rollout of each task, because the critic provides the baseline.
    """

    advantage: AdvantageSettings = GaeAdvantage()
    loss: Loss = ClipLoss(high=0.2)
    group_size: int = Field(default=1, ge=1, le=1000)


ENTRIES = tuple(
    AlgorithmEntry(name=name, settings=settings, make=Grpo, needs=("agent", "train_tasks"), takes=("validation_tasks",))
    for name, settings in (("rloo", RlooSettings), ("reinforce_pp", ReinforcePpSettings), ("ppo", PpoSettings))
)
