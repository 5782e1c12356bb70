"""What an algorithm works with: everything that is not the algorithm itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from fulmen_algorithm.domain.inputs import Demonstration
from fulmen_algorithm.domain.policy import Policy
from fulmen_algorithm.domain.ports import Notify
from fulmen_algorithm.domain.progress import Progress
from fulmen_algorithm.domain.recorder import Recorder
from fulmen_algorithm.domain.rollouts import Rollouts
from fulmen_algorithm.domain.scored_groups import ScoredGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The run's data sets.

    Attributes:
        train_tasks: One JSON document each.
        validation_tasks: One JSON document each.
        demonstrations: Conversations to learn from.
        scored: Stored groups with their scores; None if the run names no scores.
    """

    train_tasks: Sequence[bytes] = ()
    validation_tasks: Sequence[bytes] = ()
    demonstrations: Sequence[Demonstration] = ()
    scored: ScoredGroups | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The parts of one running run.

    Attributes:
        inputs: Data sets.
        rollouts: Submits groups; delivers them whole and once.
        policy: Trains, publishes, serves.
        recorder: Progress, checkpoints, figures, time.
        notify: Tells a person something.
    """

    inputs: RunInputs
    rollouts: Rollouts
    policy: Policy
    recorder: Recorder
    notify: Notify

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.recorder.progress
