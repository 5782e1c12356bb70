"""Variants of `grpo` that differ only in their defaults.

Where a paper leaves a choice open, it is that of `grpo`, such as truncated importance weights against the sampler.
"""

from typing import Annotated

from pydantic import Field

from fulmen_algorithm.algorithms.grpo import Grpo, GrpoSettings
from fulmen_algorithm.losses.advantage_settings import (
    AdvantageSettings,
    GaeAdvantage,
    GroupAdvantage,
    Overlong,
    ReinforcePpAdvantage,
    RlooAdvantage,
)
from fulmen_algorithm.losses.objectives import (
    Aggregation,
    CispoLoss,
    ClipLoss,
    GspoLoss,
    Loss,
    ReinforceLoss,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    TokenMean,
)
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.training.strict import AUTO_BY_NAME, NONE_BY_NAME


class DrGrpoSettings(GrpoSettings):
    """Settings of `dr_grpo` (arXiv:2503.20783): no division by the standard deviation or the length."""

    loss: Loss = ClipLoss(high=0.2)
    aggregation: Annotated[Aggregation | None, AUTO_BY_NAME] = SequenceMeanTokenSumNorm()


class DapoSettings(GrpoSettings):
    """Settings of `dapo` (arXiv:2503.14476): clip-higher, dynamic sampling, token mean and a penalty for length.

    Attributes:
        overlong: Penalty for length: L_max is `max_tokens`, and the penalty grows over its last fifth, as in the paper.
            It counts the tokens of a rollout; set its `max_tokens` if a rollout makes several calls. `"none"` for no
            penalty.
    """

    advantage: AdvantageSettings = GroupAdvantage(std="group")
    aggregation: Annotated[Aggregation | None, AUTO_BY_NAME] = TokenMean()
    overlong: Annotated[Overlong | None, NONE_BY_NAME] = Overlong()


class GspoSettings(GrpoSettings):
    """Settings of `gspo` (arXiv:2507.18071): the clipped ratio is the ratio of the whole sequence.

    The bounds are narrow, because the mean over a sequence changes little; larger learning rates need wider ones.
    """

    advantage: AdvantageSettings = GroupAdvantage(std="group")
    loss: Loss = GspoLoss()
    aggregation: Annotated[Aggregation | None, AUTO_BY_NAME] = SequenceMeanTokenMean()


class CispoSettings(GrpoSettings):
    """Settings of `cispo` (arXiv:2506.13585): bounds the weight of a token and keeps its gradient."""

    advantage: AdvantageSettings = GroupAdvantage(std="group")
    loss: Loss = CispoLoss()
    aggregation: Annotated[Aggregation | None, AUTO_BY_NAME] = TokenMean()


class RlooSettings(GrpoSettings):
    """Settings of `rloo` (arXiv:2402.14740): leave-one-out baseline with the gradient of REINFORCE.

    The gradient is correct only for one optimiser step per batch.
    """

    advantage: AdvantageSettings = RlooAdvantage()
    loss: Loss = ReinforceLoss()
    minibatches: int = Field(default=1, ge=1, le=1000)


class ReinforcePpSettings(GrpoSettings):
    """Settings of `reinforce_pp` (arXiv:2501.03262): token returns, whitened over the batch, under the clipped loss.

    Attributes:
        group_size: Rollouts per task; 1 by default, because rollouts of a group are not compared. The baseline `group`
            needs at least 2.
    """

    advantage: AdvantageSettings = ReinforcePpAdvantage()
    loss: Loss = ClipLoss(high=0.2)
    group_size: int = Field(default=1, ge=1, le=1000)


class PpoSettings(GrpoSettings):
    """Settings of `ppo` (arXiv:1707.06347): advantages by GAE with a learned critic.

    Attributes:
        group_size: Rollouts per task; 1 by default, because the critic provides the baseline.
    """

    advantage: AdvantageSettings = GaeAdvantage()
    loss: Loss = ClipLoss(high=0.2)
    group_size: int = Field(default=1, ge=1, le=1000)


ENTRIES = tuple(
    AlgorithmEntry(name=name, settings=settings, make=Grpo, needs=("agent", "train_tasks"), takes=("validation_tasks",))
    for name, settings in (
        ("dr_grpo", DrGrpoSettings),
        ("dapo", DapoSettings),
        ("gspo", GspoSettings),
        ("cispo", CispoSettings),
        ("rloo", RlooSettings),
        ("reinforce_pp", ReinforcePpSettings),
        ("ppo", PpoSettings),
    )
)
