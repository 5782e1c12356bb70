"""Training runs: watched step by step, paused, resumed, stopped, rolled back. Made by tools/sync_client.py of `fulmen.client.aio.runs`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.client.aio.runs import AsyncRun, AsyncRuns
from fulmen.client.face import Face, faced
from fulmen.client.resources import Model
from fulmen.client.runs import Checkpoint, Step
from fulmen.client.sync.rollouts import RolloutQuery
from fulmen.client.view import Named

__all__ = ["Run", "Runs"]


class Run(Face):
    """A training run. Iterating over it yields its steps as they are done, from the first one on."""

    _wraps = AsyncRun
    _aio: AsyncRun

    def __repr__(self) -> str:
        """Shows id, state and step."""
        return self._aio.__repr__().removeprefix("Async")

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the state, and the curves of the steps that were seen."""
        return self._aio._repr_html_()

    @property
    def proto(self) -> training_run_pb2.TrainingRun:
        """The run as it was when it was last heard of."""
        return self._aio.proto

    @property
    def name(self) -> str:
        """`projects/{project}/trainingRuns/{id}`."""
        return self._aio.name

    @property
    def id(self) -> str:
        """The id in its name."""
        return self._aio.id

    @property
    def state(self) -> str:
        """`pending`, `running`, `paused`, `succeeded`, `failed` or `cancelled`."""
        return self._aio.state

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self._aio.is_final

    @property
    def failure_message(self) -> str:
        """Why it failed; empty if it did not."""
        return self._aio.failure_message

    @property
    def algorithm(self) -> str:
        """Name of its algorithm, such as `grpo`."""
        return self._aio.algorithm

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it was created with."""
        return self._aio.settings

    @property
    def inputs(self) -> dict[str, str]:
        """Its inputs, `resources/{id}/versions/{n}` by use."""
        return self._aio.inputs

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._aio.step

    @property
    def step_count(self) -> int:
        """Number of steps planned; 0 while it is unknown."""
        return self._aio.step_count

    @property
    def results(self) -> dict[str, float]:
        """Metrics of the whole run, such as `validation_accuracy_after`."""
        return self._aio.results

    @property
    def policy_version(self) -> str:
        """The policy version that it published last, `resources/policy.{name}/versions/{n}`; empty if none."""
        return self._aio.policy_version

    @property
    def create_time(self) -> datetime.datetime | None:
        """When it was created, UTC."""
        return self._aio.create_time

    @property
    def end_time(self) -> datetime.datetime | None:
        """When it ended, UTC; None before."""
        return self._aio.end_time

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps, those that are done first, then each as it is done; over restarts of the service.

        A step that is done again after a rollback is yielded again. In a notebook a chart grows meanwhile.

        Raises:
            RunFailed: in the end, if the run failed or was cancelled.
            Unavailable: if the service cannot be reached for 3 minutes.
        """
        return self._iterate(self._aio.__aiter__())

    def wait(self) -> Run:
        """Waits for its end; returns it.

        Raises:
            RunFailed: if it failed or was cancelled.
            Unavailable: if the service cannot be reached for 3 minutes.
        """
        self._call(self._aio.wait())
        return self

    def refresh(self) -> Run:
        """Reads its present state; returns it."""
        self._call(self._aio.refresh())
        return self

    def stages(self) -> list[Run]:
        """Returns the runs of all stages of its training, in order, itself included."""
        return self._call(self._aio.stages())

    def steps(self) -> list[Step]:
        """Returns the steps that are done, ordered by number; of a repeated step the last one."""
        return self._call(self._aio.steps())

    def to_pandas(self) -> Any:
        """Returns the metrics of the steps as a `pandas.DataFrame`, indexed by step.

        Raises:
            ExtraMissing: if pandas is not installed.
        """
        return self._call(self._aio.to_pandas())

    def rollouts(self, *, filter: str = "", limit: int | None = None, details: bool = True) -> RolloutQuery:
        """Selects its rollouts, newest first; the arguments are those of `client.rollouts.list`."""
        return faced(self._aio.rollouts(filter=filter, limit=limit, details=details))

    def model(self) -> Model:
        """Returns the version of the policy that it published last.

        Raises:
            ResourceNotFound: if it has published none.
        """
        return self._call(self._aio.model())

    def pause(self) -> None:
        """Pauses it at a checkpoint after the current step; rollouts in flight are kept.

        Raises:
            TrainingRunStateInvalid: if it has ended.
        """
        self._call(self._aio.pause())

    def resume(self) -> None:
        """Resumes it when a run slot is free.

        Raises:
            TrainingRunStateInvalid: if it is not paused.
        """
        self._call(self._aio.resume())

    def stop(self) -> None:
        """Stops it for good and cancels its rollouts; published versions stay. The stages after it do not begin.

        In place of a stage that has ended, a later one is stopped, and in place of one that has not begun, the one that it
        waits for.
        """
        self._call(self._aio.stop())

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the checkpoints that it can be rolled back to, newest first."""
        return self._call(self._aio.checkpoints())

    def rollback(self, checkpoint: int | Named) -> None:
        """Rolls it back to a checkpoint, given by its number or record; it resumes when a run slot is free.

        Raises:
            CheckpointNotFound: if there is none.
            TrainingRunStateInvalid: if it is neither paused nor ended.
        """
        self._call(self._aio.rollback(checkpoint))

    def report(self) -> str:
        """Returns its report, Markdown; complete if it has ended."""
        return self._call(self._aio.report())

    @property
    def aio(self) -> AsyncRun:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Runs(Face):
    """Training runs."""

    _wraps = AsyncRuns
    _aio: AsyncRuns

    def get(self, run: str | Named) -> Run:
        """Returns a run by its name or id.

        Raises:
            TrainingRunNotFound: if there is none.
        """
        return self._call(self._aio.get(run))

    def list(self, *, limit: int | None = None) -> Iterator[Run]:
        """Yields the runs of the project, newest first.

        >>> [run.state for run in client.runs.list(limit=1)]
        []

        Args:
            limit: maximum number; None for all.
        """
        return self._iterate(self._aio.list(limit=limit))

    @property
    def aio(self) -> AsyncRuns:
        """The same, asynchronous, over the same connection."""
        return self._aio
