"""A training run as a value, and the only table of its state changes.

Invariant: every change uses `moved`, `rolled_back` or `waiting_again`, and only the latter two leave a final state. A
rollback begins a new branch of the run; nothing of the run's past is lost by it. Only a stage that failed without having
begun waits again.
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
        """Whether the run has ended; only a rollback resumes it."""
        return not _NEXT[self]


_NEXT: Mapping[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.RUNNING, RunState.PAUSED, RunState.FAILED, RunState.CANCELLED}),
    RunState.RUNNING: frozenset({RunState.PAUSED, RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}),
    RunState.PAUSED: frozenset({RunState.PENDING, RunState.CANCELLED}),
    RunState.SUCCEEDED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}
_MAY_ROLL_BACK = frozenset({RunState.PAUSED, RunState.SUCCEEDED, RunState.FAILED})


class PolicyOrigin(StrEnum):
    """Source of a run's initial weights."""

    NEWEST = "newest"
    VERSION = "version"
    PATH = "path"
    BASE = "base"
    BUILD = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Policy of a run and source of its first weights.

    Attributes:
        name: Name of the policy and of its public model; empty for a run without a policy.
        origin: Source of the initial weights.
        source: Version name, folder, `hf:` or `model:` name or `file.py:function`; empty for the newest version.
    """

    name: str
    origin: PolicyOrigin = PolicyOrigin.NEWEST
    source: str = ""


NO_POLICY = PolicySpec(name="")
"""The policy of a run that neither trains nor serves one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training run, as stored and shown.

    Attributes:
        name: `projects/{project}/trainingRuns/{id}`.
        settings_json: The algorithm's settings with every default filled in, as JSON.
        inputs: Pinned resource versions by use.
        provenance: Data needed to repeat the run; see `TrainingRun.provenance` in the protos. Empty before its first start.
        branch_points: Sequences of the checkpoints that it was rolled back to, in order. Each began a branch.
        collapses: Number of rollbacks caused by a collapse.
        request_id: Of the request that created it; may be empty.
        request_digest: Distinguishes a repeated request from a different one with the same name.
        stages: Names of the runs of all stages of its training, in order; empty if it is the only one.
        prompt_version: The best prompt that it found; empty if it searches none or has not ended.
        tags: In order, each once.
        pause_at_step: Step after which it pauses automatically; 0 for none.
    """

    name: str
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
    provenance: Mapping[str, str] = field(default_factory=dict)
    start_time: datetime | None = None
    end_time: datetime | None = None
    branch_points: tuple[int, ...] = ()
    collapses: int = 0
    request_id: str = ""
    request_digest: str = ""
    stages: tuple[str, ...] = ()
    prompt_version: str = ""
    tags: tuple[str, ...] = ()
    pause_at_step: int = 0

    @property
    def project(self) -> str:
        """`projects/{project}`, which its name holds."""
        return self.name.partition("/trainingRuns/")[0]

    @property
    def run_id(self) -> str:
        """The id in the name, unique in the project."""
        return self.name.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The run's folder below the folder of all runs: `{project}/{id}`."""
        return f"{self.project.rpartition('/')[2]}/{self.run_id}"

    @property
    def stages_before(self) -> tuple[str, ...]:
        """Names of the earlier stages of its training, in order."""
        return self.stages[: self.stages.index(self.name)] if self.stages else ()

    @property
    def failed_unbegun(self) -> bool:
        """Whether it is a stage that failed with one before it."""
        return bool(self.stages_before) and self.state is RunState.FAILED and self.start_time is None

    @property
    def stages_to_cancel(self) -> tuple[str, ...]:
        """Names of the runs of which the first that has not ended is cancelled in place of this one, in order."""
        if not self.stages:
            return (self.name,)
        return self.stages if self.start_time is None else self.stages[self.stages.index(self.name) :]

    @property
    def uses_rollouts(self) -> bool:
        """Whether it runs an agent."""
        return "agent" in self.inputs

    @property
    def runnable(self) -> bool:
        """Whether the run may occupy a slot now."""
        return self.state in (RunState.PENDING, RunState.RUNNING)

    def descends_from(self, *, branch: int, sequence: int) -> bool:
        """Returns whether a checkpoint belongs to the run's present branch or its ancestors.

        Args:
            branch: Branch in which it was written.
            sequence: Its sequence; of two, the later one's is greater, whatever the branch.
        """
        return all(sequence <= point for point in self.branch_points[branch:])


def sendable(text: str) -> str:
    """Returns a text that messages take: half of a surrogate pair, which texts from JSON may hold, becomes `?`."""
    return text.encode(errors="replace").decode()


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
        failure_message=sendable(failure_message),
        start_time=run.start_time or (now if state is RunState.RUNNING else None),
        end_time=now if state.final else None,
    )


def waiting_again(run: TrainingRun) -> TrainingRun:
    """Returns a stage that failed without having begun as it waits for the one before it, which was rolled back.

    Raises:
        TrainingRunStateInvalid: if it is not such a stage.
    """
    if not run.failed_unbegun:
        raise TrainingRunStateInvalid(
            f"A run that is {run.state} cannot be queued again.", training_run=run.name, state=run.state
        )
    return replace(run, state=RunState.PENDING, failure_message="", end_time=None)


def rolled_back(run: TrainingRun, *, sequence: int, step: int, collapsed: bool = False) -> TrainingRun:
    """Returns the run rolled back to a checkpoint: pending, or still running if its reward collapsed.

    Args:
        run: Paused, succeeded or failed; or running, if its own watch asks for it.
        sequence: Sequence of the checkpoint.
        step: Step of the checkpoint.
        collapsed: Whether a collapse caused it.

    Raises:
        TrainingRunStateInvalid: if the run is in another state.
    """
    if run.state not in _MAY_ROLL_BACK and not (collapsed and run.state is RunState.RUNNING):
        raise TrainingRunStateInvalid(
            f"A run that is {run.state} cannot be rolled back.", training_run=run.name, state=run.state
        )
    return replace(
        run,
        state=run.state if collapsed else RunState.PENDING,
        failure_message="",
        end_time=None,
        step=step,
        branch_points=(*run.branch_points, sequence),
        collapses=run.collapses + collapsed,
    )
