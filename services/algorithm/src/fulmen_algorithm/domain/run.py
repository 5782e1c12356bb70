"""A training run as a value, and the only table of its state changes.

Invariant: a final state never changes, and every change goes through `moved`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from fulmen.errors import TrainingRunStateInvalid


class RunState(StrEnum):
    """State of a training run, as in `fulmen.algorithm.v1.TrainingRunState`."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        """Tells whether the state never changes again."""
        return not _NEXT[self]


_NEXT: Mapping[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.RUNNING, RunState.CANCELLED}),
    RunState.RUNNING: frozenset({RunState.PAUSED, RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}),
    RunState.PAUSED: frozenset({RunState.RUNNING, RunState.CANCELLED}),
    RunState.SUCCEEDED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}


class PolicyOrigin(StrEnum):
    """Where a run's first weights come from."""

    NEWEST = "newest"
    VERSION = "version"
    PATH = "path"
    BUILD = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What a run trains.

    Attributes:
        name: Name of the policy and of its public model.
        origin: Where the first weights come from.
        source: Version name, folder or `file.py:function`; empty for the newest version.
    """

    name: str
    origin: PolicyOrigin = PolicyOrigin.NEWEST
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training run, as it is stored and shown.

    Attributes:
        name: `trainingRuns/{id}`.
        settings_json: The algorithm's settings with every default filled in, as JSON.
        inputs: Pinned resource versions by use.
        resume_requested: Whether a paused run waits for its turn to go on.
        request_id: Of the request that created it; empty if it had none.
        request_digest: Tells a repeated request from a different one with the same name.
    """

    name: str
    project: str
    display_name: str
    algorithm: str
    settings_json: str
    policy: PolicySpec
    inputs: Mapping[str, str]
    create_time: datetime
    state: RunState = RunState.PENDING
    failure_message: str = ""
    step: int = 0
    step_count: int = 0
    policy_version: str = ""
    model_path: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    start_time: datetime | None = None
    end_time: datetime | None = None
    resume_requested: bool = False
    request_id: str = ""
    request_digest: str = ""

    @property
    def run_id(self) -> str:
        """The part of the name after `trainingRuns/`."""
        return self.name.removeprefix("trainingRuns/")

    @property
    def uses_rollouts(self) -> bool:
        """Tells whether it runs an agent."""
        return "agent" in self.inputs

    @property
    def runnable(self) -> bool:
        """Tells whether the run may take its turn now."""
        return self.state in (RunState.PENDING, RunState.RUNNING) or (
            self.state is RunState.PAUSED and self.resume_requested
        )


def moved(run: TrainingRun, state: RunState, *, now: datetime, failure_message: str = "") -> TrainingRun:
    """Returns the run in another state.

    Raises:
        TrainingRunStateInvalid: if the table has no such change.
    """
    if state not in _NEXT[run.state]:
        raise TrainingRunStateInvalid(
            f"A run that is {run.state} cannot become {state}.", training_run=run.name, state=run.state
        )
    return replace(
        run,
        state=state,
        failure_message=failure_message,
        resume_requested=False,
        start_time=run.start_time or (now if state is RunState.RUNNING else None),
        end_time=now if state.final else None,
    )
