"""The built-in algorithms. Made by tools/algorithm_classes.py of those of the algorithm service."""

from __future__ import annotations

from typing import Unpack

from fulmen.training import algorithm_settings
from fulmen.training.algorithm import Algorithm

__all__ = [
    "APO",
    "CISPO",
    "DAPO",
    "Distill",
    "DPO",
    "DrGRPO",
    "Evaluate",
    "GEPA",
    "GRPO",
    "GSPO",
    "KTO",
    "PPO",
    "ReinforcePP",
    "Rejection",
    "Replay",
    "RewardModel",
    "RLOO",
    "Serve",
    "SFT",
]


class APO(Algorithm):
    """Improves the prompt of an agent: a critic criticises it, an editor rewrites it, and the best prompts are kept.

    Its settings are those of `ApoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.ApoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("apo", **settings)


class CISPO(Algorithm):
    """Bounds the weight of a token and keeps its gradient (arXiv:2506.13585).

    Its settings are those of `CispoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.CispoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("cispo", **settings)


class DAPO(Algorithm):
    """Clip-higher, dynamic sampling, token mean and a penalty for length (arXiv:2503.14476).

    Its settings are those of `DapoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.DapoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("dapo", **settings)


class Distill(Algorithm):
    """A teacher scores each token that the policy samples, and no reward is needed (arXiv:2306.13649).

    Its settings are those of `DistillSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.DistillSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("distill", **settings)


class DPO(Algorithm):
    """Learns from pairs of answers, of a data set or of stored groups, which of two answers is better (DPO, IPO).

    Its settings are those of `DpoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.DpoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("dpo", **settings)


class DrGRPO(Algorithm):
    """No division by the standard deviation or the length (arXiv:2503.20783).

    Its settings are those of `DrGrpoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.DrGrpoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("dr_grpo", **settings)


class Evaluate(Algorithm):
    """Measures pass@k and the mean reward of an agent, with confidence intervals.

    Its settings are those of `EvaluateSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.EvaluateSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("evaluate", **settings)


class GEPA(Algorithm):
    """Improves the prompt of an agent by reflection on traces; keeps each prompt that is the best at some task (GEPA).

    Its settings are those of `GepaSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.GepaSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("gepa", **settings)


class GRPO(Algorithm):
    """Samples groups, trains on each rollout relative to its group, publishes, and repeats.

    Its settings are those of `GrpoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.GrpoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("grpo", **settings)


class GSPO(Algorithm):
    """The clipped ratio is that of the whole sequence (arXiv:2507.18071).

    Its settings are those of `GspoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.GspoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("gspo", **settings)


class KTO(Algorithm):
    """Learns from single answers, desirable or not by their reward, without pairs (KTO).

    Its settings are those of `KtoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.KtoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("kto", **settings)


class PPO(Algorithm):
    """Advantages by GAE with a learned critic (arXiv:1707.06347).

    Its settings are those of `PpoSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.PpoSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("ppo", **settings)


class ReinforcePP(Algorithm):
    """Token returns, whitened over the batch, under the clipped loss (arXiv:2501.03262).

    Its settings are those of `ReinforcePpSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.ReinforcePpSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("reinforce_pp", **settings)


class Rejection(Algorithm):
    """Samples groups, imitates the policy's best answers, publishes, and repeats.

    Its settings are those of `RejectionSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.RejectionSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("rejection", **settings)


class Replay(Algorithm):
    """Trains on stored groups for several epochs.

    Its settings are those of `ReplaySettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.ReplaySettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("replay", **settings)


class RewardModel(Algorithm):
    """Learns a scalar score of answers from pairs of them, of a data set or of stored groups (Bradley-Terry).

    Its settings are those of `RewardModelSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.RewardModelSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("reward_model", **settings)


class RLOO(Algorithm):
    """Leave-one-out baseline with the gradient of REINFORCE (arXiv:2402.14740).

    Its settings are those of `RlooSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.RlooSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("rloo", **settings)


class Serve(Algorithm):
    """Serves the version that the run names.

    Its settings are those of `ServeSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.ServeSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("serve", **settings)


class SFT(Algorithm):
    """Minimises the cross-entropy of the assistant's tokens.

    Its settings are those of `SftSettings`; see docs/algorithms-rl.md.
    """

    def __init__(self, **settings: Unpack[algorithm_settings.SftSettings]) -> None:
        """Keeps the settings that differ from the defaults of the service."""
        super().__init__("sft", **settings)
