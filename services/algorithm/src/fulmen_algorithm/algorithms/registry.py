"""The algorithms by name."""

from fulmen_algorithm.algorithms.grpo import Grpo, GrpoSettings
from fulmen_algorithm.algorithms.replay import Replay, ReplaySettings
from fulmen_algorithm.algorithms.sft import Sft, SftSettings
from fulmen_algorithm.domain.algorithm import AlgorithmEntry, Registry

ALGORITHMS: Registry = {
    "sft": AlgorithmEntry(settings=SftSettings, make=Sft, needs=("demonstrations",)),
    "grpo": AlgorithmEntry(
        settings=GrpoSettings, make=Grpo, needs=("agent", "train_tasks"), takes=("validation_tasks",)
    ),
    "replay": AlgorithmEntry(
        settings=ReplaySettings, make=Replay, needs=("scores",), takes=("agent", "validation_tasks")
    ),
}
