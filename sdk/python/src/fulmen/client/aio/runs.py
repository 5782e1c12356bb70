"""Training runs: watched step by step, paused, resumed, stopped, rolled back."""

from __future__ import annotations

import datetime
import json
from collections.abc import AsyncIterator
from typing import Any

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.client.aio.base import Part, Session, listed
from fulmen.client.aio.resources import AsyncResources
from fulmen.client.aio.rollouts import AsyncRolloutQuery, AsyncRollouts
from fulmen.client.chart import LiveChart, chart_html
from fulmen.client.frames import steps_frame
from fulmen.client.resources import Model
from fulmen.client.runs import Checkpoint, RunFailed, Step
from fulmen.client.view import Named
from fulmen.messages import enum_word, moment
from fulmen.training.following import FINAL_STATES, follow_run, read_steps

__all__ = ["AsyncRun", "AsyncRuns"]


class AsyncRun:
    """A training run. Iterating over it yields its steps as they complete, starting with the first."""

    def __init__(self, session: Session, proto: training_run_pb2.TrainingRun) -> None:
        """Keeps the run; reads nothing."""
        self._session = session
        self._proto = proto
        self._steps: dict[int, Step] = {}

    def __repr__(self) -> str:
        """Shows id, state and step."""
        return f"{type(self).__name__}(id={self.id!r}, state={self.state!r}, step={self.step}/{self.step_count})"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the state, and the curves of the steps that were seen."""
        return chart_html(self.id, self.state, list(self._steps.values()))

    @property
    def proto(self) -> training_run_pb2.TrainingRun:
        """The message of the run, as last received."""
        return self._proto

    @property
    def name(self) -> str:
        """`projects/{project}/trainingRuns/{id}`."""
        return str(self.proto.name)

    @property
    def id(self) -> str:
        """The id in its name."""
        return self.name.rpartition("/")[2]

    @property
    def state(self) -> str:
        """`pending`, `running`, `paused`, `succeeded`, `failed` or `cancelled`."""
        return enum_word(self.proto, "state")

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.proto.state in FINAL_STATES

    @property
    def failure_message(self) -> str:
        """Why it failed; empty if it did not."""
        return str(self.proto.failure_message)

    @property
    def algorithm(self) -> str:
        """Name of its algorithm, such as `grpo`."""
        return str(self.proto.algorithm)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it was created with."""
        return dict(json.loads(self.proto.settings_json or "{}"))

    @property
    def inputs(self) -> dict[str, str]:
        """Its inputs, `resources/{id}/versions/{n}` by use."""
        return dict(self.proto.inputs)

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.proto.step)

    @property
    def step_count(self) -> int:
        """Number of planned steps; 0 while it is unknown."""
        return int(self.proto.step_count)

    @property
    def results(self) -> dict[str, float]:
        """Metrics of the whole run, such as `validation_accuracy_after`."""
        return dict(self.proto.results)

    @property
    def policy_version(self) -> str:
        """The policy version that it published last, `resources/policy.{name}/versions/{n}`; empty if none."""
        return str(self.proto.policy_version)

    @property
    def create_time(self) -> datetime.datetime | None:
        """When it was created, UTC."""
        return moment(self.proto.create_time)

    @property
    def end_time(self) -> datetime.datetime | None:
        """When it ended, UTC; None before."""
        return moment(self.proto.end_time)

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Yields the completed steps, then each step as it completes, across restarts of the service.

        A step that is repeated after a rollback is yielded again. In a notebook a chart is updated meanwhile.

        Raises:
            RunFailed: at the end, if the run failed or was cancelled.
            Unavailable: if the service cannot be reached for 3 minutes.
        """
        chart = LiveChart.in_notebook()
        async for event in follow_run(self._session.services, self.name, on_interruption=lambda _: None):
            if event.HasField("run"):
                self._proto = event.run
            if event.HasField("step"):
                step = Step(event.step)
                self._steps[step.number] = step
                yield step
            if chart is not None:
                (chart.show_now if event.HasField("run") else chart.show)(self._repr_html_)
        if self.state != "succeeded":
            raise RunFailed(self.name, self.state, self.failure_message)

    async def wait(self) -> AsyncRun:
        """Waits for the end of the run; returns the run.

        Raises:
            RunFailed: if it failed or was cancelled.
            Unavailable: if the service cannot be reached for 3 minutes.
        """
        async for _ in self:
            pass
        return self

    async def refresh(self) -> AsyncRun:
        """Reads the current state of the run; returns the run."""
        request = training_run_service_pb2.GetTrainingRunRequest(name=self.name)
        self._proto = (await self._session.services.training_runs.GetTrainingRun(request)).training_run
        return self

    async def stages(self) -> list[AsyncRun]:
        """Returns the runs of all stages of its training, in order, itself included."""
        names = list(self.proto.stages) or [self.name]
        return [await AsyncRuns(self._session).get(name) for name in names]

    async def steps(self) -> list[Step]:
        """Returns the completed steps, ordered by number; for a repeated step, the last result."""
        await self.refresh()
        self._steps = {each.step: Step(each) for each in await read_steps(self._session.services, self.proto)}
        return list(self._steps.values())

    async def to_pandas(self) -> Any:
        """Returns the metrics of the steps as a `pandas.DataFrame`, indexed by step.

        Raises:
            ExtraMissing: if pandas is not installed.
        """
        return steps_frame(await self.steps())

    def rollouts(self, *, filter: str = "", limit: int | None = None, details: bool = True) -> AsyncRolloutQuery:
        """Selects its rollouts, newest first; the arguments are the same as of `client.rollouts.list`."""
        return AsyncRollouts(self._session).list(run=self.name, filter=filter, limit=limit, details=details)

    async def model(self) -> Model:
        """Returns the version of the policy that it published last.

        Raises:
            ResourceNotFound: if it has published none.
        """
        if not self.policy_version:
            await self.refresh()
        resource = await AsyncResources(self._session).get(self.policy_version)
        return Model(resource.proto)

    async def pause(self) -> None:
        """Pauses it at a checkpoint after the current step; rollouts in flight are kept.

        Raises:
            TrainingRunStateInvalid: if it has ended.
        """
        request = training_run_service_pb2.PauseTrainingRunRequest(name=self.name)
        self._proto = (await self._session.services.training_runs.PauseTrainingRun(request)).training_run

    async def resume(self) -> None:
        """Resumes it when a run slot is free.

        Raises:
            TrainingRunStateInvalid: if it is not paused.
        """
        request = training_run_service_pb2.ResumeTrainingRunRequest(name=self.name)
        self._proto = (await self._session.services.training_runs.ResumeTrainingRun(request)).training_run

    async def stop(self) -> None:
        """Stops the run permanently and cancels its rollouts; published versions are kept. The stages after it do not
        begin.

        If this stage has ended, a later stage is stopped; if it has not begun, the stage that it waits for is.
        """
        request = training_run_service_pb2.CancelTrainingRunRequest(name=self.name)
        stopped = (await self._session.services.training_runs.CancelTrainingRun(request)).training_run
        self._proto = stopped if stopped.name == self.name else self._proto

    async def checkpoints(self) -> list[Checkpoint]:
        """Returns the checkpoints that it can be rolled back to, newest first."""
        request = training_run_service_pb2.ListCheckpointsRequest(parent=self.name)
        call = self._session.services.training_runs.ListCheckpoints
        return [Checkpoint(each) async for each in listed(call, request, "checkpoints")]

    async def rollback(self, checkpoint: int | Named) -> None:
        """Rolls it back to a checkpoint, given by its number or record; it resumes when a run slot is free.

        Raises:
            CheckpointNotFound: if there is none.
            TrainingRunStateInvalid: if it is neither paused nor ended.
        """
        name = f"{self.name}/checkpoints/{checkpoint}" if isinstance(checkpoint, int) else checkpoint.name
        request = training_run_service_pb2.RollbackTrainingRunRequest(checkpoint=name)
        self._proto = (await self._session.services.training_runs.RollbackTrainingRun(request)).training_run

    async def report(self) -> str:
        """Returns its report, Markdown; complete if it has ended."""
        request = training_run_service_pb2.GetTrainingRunReportRequest(name=self.name)
        return str((await self._session.services.training_runs.GetTrainingRunReport(request)).markdown)


class AsyncRuns(Part):
    """Training runs."""

    async def get(self, run: str | Named) -> AsyncRun:
        """Returns a run by its name or id.

        Raises:
            TrainingRunNotFound: if there is none.
        """
        request = training_run_service_pb2.GetTrainingRunRequest(name=self._session.run(run))
        return AsyncRun(self._session, (await self._services.training_runs.GetTrainingRun(request)).training_run)

    async def list(self, *, limit: int | None = None) -> AsyncIterator[AsyncRun]:
        """Yields the runs of the project, newest first.

        >>> [run.state async for run in client.runs.list(limit=1)]
        []

        Args:
            limit: maximum number; None for all.
        """
        request = training_run_service_pb2.ListTrainingRunsRequest(project=self._session.project)
        async for each in listed(self._services.training_runs.ListTrainingRuns, request, "training_runs", limit):
            yield AsyncRun(self._session, each)
