"""The algorithms by name."""

from fulmen_algorithm.algorithms.base import AlgorithmEntry, Registry
from fulmen_algorithm.algorithms.grpo import Grpo, GrpoSettings
from fulmen_algorithm.algorithms.sft import Sft, SftSettings

ALGORITHMS: Registry = {
    "sft": AlgorithmEntry(settings=SftSettings, make=Sft, needs=("demonstrations",)),
    "grpo": AlgorithmEntry(
        settings=GrpoSettings, make=Grpo, needs=("agent", "train_tasks"), takes=("validation_tasks",)
    ),
}
