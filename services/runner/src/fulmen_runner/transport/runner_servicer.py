"""Serves `fulmen.runner.v1.RunnerService`."""

import asyncio
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import ArgumentInvalid, NotYetServed, Violation
from fulmen.runner.v1 import runner_service_pb2 as messages
from fulmen.runner.v1 import runner_service_pb2_grpc
from fulmen_runner.domain.drain import Drain
from fulmen_runner.domain.pool import AttemptPool

MAX_SLOTS = 10_000


class RunnerServicer(runner_service_pb2_grpc.RunnerServiceServicer):
    """Looks after the runner."""

    def __init__(self, *, pool: AttemptPool, drain: Drain) -> None:
        self._pool = pool
        self._session = pool.session
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    async def GetStatus(self, request: messages.GetStatusRequest, context: Any) -> messages.GetStatusResponse:
        """Tells what the runner does now."""
        running = []
        for attempt, run in self._session.running.items():
            start_time = Timestamp()
            start_time.FromNanoseconds(int(run.start_unix_s * 1e9))
            running.append(messages.RunningAttempt(attempt=attempt, start_time=start_time))
        session_id = self._session.session_id
        return messages.GetStatusResponse(
            session=f"runners/{session_id}" if session_id else "",
            slot_count=self._session.slots,
            running=running,
            completed_count=self._session.completed_count,
            draining=self._session.draining,
        )

    async def Drain(self, request: messages.DrainRequest, context: Any) -> messages.DrainResponse:
        """Begins to drain; the process ends when it is done."""
        grace_s = self._drain.default_grace_s
        if request.HasField("grace"):
            grace_s = request.grace.ToTimedelta().total_seconds()
            if grace_s < 0:
                raise ArgumentInvalid(
                    "The request is malformed.",
                    violations=[Violation(field="grace", description="must not be negative")],
                )
        self._drain.begin()
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain.wait_then_request(grace_s), name="drain")
        return messages.DrainResponse(running_count=len(self._session.running))

    async def SetSlots(self, request: messages.SetSlotsRequest, context: Any) -> messages.SetSlotsResponse:
        """Changes how many attempts may run at once."""
        if not 1 <= request.slot_count <= MAX_SLOTS:
            raise ArgumentInvalid(
                "The request is malformed.",
                violations=[Violation(field="slot_count", description=f"must lie in 1 to {MAX_SLOTS}")],
            )
        self._session.set_slots(request.slot_count)
        self._pool.changed.set()
        return messages.SetSlotsResponse(slot_count=self._session.slots)

    async def DumpStacks(self, request: messages.DumpStacksRequest, context: Any) -> messages.DumpStacksResponse:
        """Not yet served."""
        raise NotYetServed("DumpStacks is not yet served.")
