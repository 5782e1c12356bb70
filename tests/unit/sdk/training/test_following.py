"""A run is followed to its end, whatever becomes of the connection meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import Unavailable
from fulmen.rpc.services import Services
from fulmen.training import following

NAME = "projects/default/trainingRuns/one"


class Stream:
    """A stream of the service: silent, or with the event of the run's end."""

    def __init__(self, *, silent: bool) -> None:
        self._events = self._all(silent)

    async def _all(self, silent: bool) -> AsyncIterator[training_run_service_pb2.WatchTrainingRunResponse]:
        if silent:
            await asyncio.Event().wait()
        run = training_run_pb2.TrainingRun(name=NAME, state=training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED)
        event = training_run_pb2.TrainingRunEvent(sequence=1, run=run)
        yield training_run_service_pb2.WatchTrainingRunResponse(event=event)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._events)

    def cancel(self) -> None:
        """Ends it."""


class Away:
    """A service whose first stream falls silent because it has gone, and which then is back."""

    def __init__(self) -> None:
        self.opened = 0

    @property
    def training_runs(self) -> Away:
        """The stub of the service."""
        return self

    def WatchTrainingRun(self, request: training_run_service_pb2.WatchTrainingRunRequest) -> Stream:
        """Opens a stream."""
        self.opened += 1
        return Stream(silent=self.opened == 1)

    async def GetTrainingRun(self, request: training_run_service_pb2.GetTrainingRunRequest) -> None:
        """Cannot be reached."""
        raise Unavailable("Connection refused")


async def test_a_silent_stream_of_a_service_that_has_gone_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "IDLE_LIMIT_S", 0.01)
    monkeypatch.setattr(following, "REOPEN_WAIT_S", 0.01)
    service, told = Away(), list[str]()
    events = [e async for e in following.follow_run(cast(Services, service), NAME, on_interruption=told.append)]
    assert [event.sequence for event in events] == [1]
    assert len(told) == 1
