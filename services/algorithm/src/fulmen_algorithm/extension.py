"""The public names for custom algorithms; see docs/extending.md and examples/best_of_n."""

from fulmen_algorithm.algorithms.sampling import (
    SamplingSettings,
    sample_groups,
    submit_next,
    supervised_rows,
    within,
)
from fulmen_algorithm.algorithms.validation import Validator
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, rewards_of
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, AlgorithmSettings, permutation
from fulmen_algorithm.runs.context import RunContext, RunInputs
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChatAnswer, ChatRequest
from fulmen_algorithm.runs.progress import Consumed, Outcome
from fulmen_algorithm.training.rows import Row

__all__ = [
    "AlgorithmEntry",
    "AlgorithmSettings",
    "ChatAnswer",
    "ChatRequest",
    "Consumed",
    "FinishedGroup",
    "FinishedRollout",
    "Outcome",
    "RolloutTrajectory",
    "Row",
    "RunContext",
    "RunFailed",
    "RunInputs",
    "SamplingSettings",
    "TokenSequence",
    "Validator",
    "permutation",
    "rewards_of",
    "sample_groups",
    "submit_next",
    "supervised_rows",
    "within",
]
