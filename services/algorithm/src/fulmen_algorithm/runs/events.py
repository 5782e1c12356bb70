"""The events of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from fulmen_algorithm.runs.rewards import RewardDistribution
from fulmen_algorithm.runs.run import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, and the rewards of its rollouts; step 0 holds the measurements before the first."""

    step: int
    values: Mapping[str, float]
    rewards: RewardDistribution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message for a person; severity is `info`, `warning` or `error`."""

    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event; exactly one of `run`, `step` and `notice` is set."""

    sequence: int
    time: datetime
    run: TrainingRun | None = None
    step: StepMetrics | None = None
    notice: Notice | None = None

    @property
    def last(self) -> bool:
        """Whether the run ended with this event; only notices follow, until a rollback."""
        return self.run is not None and self.run.state.final
