"""A service that streams the events of one training run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.rpc.services import Services

__all__ = ["RUNNING", "SUCCEEDED", "Event", "RunService", "run", "step"]

RUNNING = training_run_pb2.TRAINING_RUN_STATE_RUNNING
SUCCEEDED = training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED
Event = training_run_pb2.TrainingRunEvent


def run(step: int = 0, *, state: int = RUNNING, rollbacks: int = 0) -> training_run_pb2.TrainingRun:
    """Returns a run."""
    return training_run_pb2.TrainingRun(
        name="projects/default/trainingRuns/a", state=cast(Any, state), step=step, rollback_count=rollbacks
    )


def step(number: int, **values: float) -> Event:
    """Returns the event of a step."""
    return Event(step=training_run_pb2.StepMetrics(step=number, values=values))


class RunService:
    """The service, its stub and its stream.

    Args:
        events: Events of the run, the last of which with a run is its state.
        closes: Whether the stream ends after them; otherwise it stays open.
    """

    def __init__(self, events: Sequence[Event], *, closes: bool = False) -> None:
        self._events = events
        self._closes = closes
        self.run = training_run_pb2.TrainingRun()
        self.run.CopyFrom(next((event.run for event in reversed(events) if event.HasField("run")), run()))
        self.cancelled = False

    @property
    def client(self) -> Services:
        """The service as the command line sees it."""
        return cast(Services, self)

    @property
    def training_runs(self) -> RunService:
        """The stub."""
        return self

    def WatchTrainingRun(self, request: training_run_service_pb2.WatchTrainingRunRequest) -> RunService:
        """Opens the stream."""
        self._answers = self._all(request.after_sequence)
        return self

    async def GetTrainingRun(self, request: Any) -> training_run_service_pb2.GetTrainingRunResponse:
        """Returns the run."""
        return training_run_service_pb2.GetTrainingRunResponse(training_run=self.run)

    async def _all(self, after: int) -> AsyncIterator[training_run_service_pb2.WatchTrainingRunResponse]:
        for number, event in enumerate(self._events[after:], start=after + 1):
            event.sequence = number
            yield training_run_service_pb2.WatchTrainingRunResponse(event=event)
        if not self._closes:
            await asyncio.Event().wait()

    def __aiter__(self) -> RunService:
        return self

    async def __anext__(self) -> training_run_service_pb2.WatchTrainingRunResponse:
        return await anext(self._answers)

    def cancel(self) -> None:
        """Ends the stream."""
        self.cancelled = True
