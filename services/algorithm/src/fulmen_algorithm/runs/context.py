"""The context of an algorithm: everything that it uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fulmen_algorithm.policy.policy import Policy
from fulmen_algorithm.policy.served_version import ServedVersion
from fulmen_algorithm.rollouts.feed import Rollouts
from fulmen_algorithm.rollouts.scored_groups import ScoredGroups
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.creation.inputs import Demonstration, Preference
from fulmen_algorithm.runs.ports import ChatModels, Content, Notify, ResourceStore
from fulmen_algorithm.runs.progress import Progress
from fulmen_algorithm.runs.recorder import Recorder
from fulmen_algorithm.runs.run import TrainingRun

OnNoSignal = Literal["stop", "notice"]
"""Reaction to a run in which rewards never differ within a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The run's data sets.

    Attributes:
        train_tasks: One JSON document each.
        validation_tasks: One JSON document each.
        test_tasks: One JSON document each.
        demonstrations: Conversations to learn from.
        validation_demonstrations: Held-out conversations.
        preferences: Pairs of answers, the better one first.
        scored: Stored groups with their scores; None if the run names no scores.
        prompt: The prompt passed to the run's rollouts; None if the run names no prompt.
    """

    train_tasks: Sequence[bytes] = ()
    validation_tasks: Sequence[bytes] = ()
    test_tasks: Sequence[bytes] = ()
    demonstrations: Sequence[Demonstration] = ()
    validation_demonstrations: Sequence[Demonstration] = ()
    preferences: Sequence[Preference] = ()
    scored: ScoredGroups | None = None
    prompt: Content | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The parts of an active run.

    Attributes:
        run: The run as it was created.
        inputs: Data sets.
        rollouts: Submits groups and delivers each finished group exactly once.
        trained: The policy; None for an algorithm that trains no weights.
        served: The policy version named by a run that trains no weights; None if the run names no version.
        chat: Asks models for the algorithm itself: critics, editors, judges.
        resources: Versioned resources of the run's project: prompts, data sets, policies.
        recorder: Progress, checkpoints, metrics, time.
        control: Stop requests; every wait for something else uses `control.unless_stopped`.
        notify: Appends a notice to the run's events.
        on_no_signal: The operator's default of the setting `on_no_signal`: `stop` or `notice`.
    """

    run: TrainingRun
    inputs: RunInputs
    rollouts: Rollouts
    trained: Policy | None
    served: ServedVersion | None
    chat: ChatModels
    resources: ResourceStore
    recorder: Recorder
    control: RunControl
    notify: Notify
    on_no_signal: OnNoSignal = "notice"

    @property
    def policy(self) -> Policy:
        """Trains, publishes, serves.

        Raises:
            LookupError: if the algorithm's entry declares that it trains no weights.
        """
        if self.trained is None:
            raise LookupError(f"{self.run.algorithm!r} is registered as one that trains no weights.")
        return self.trained

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.recorder.progress
