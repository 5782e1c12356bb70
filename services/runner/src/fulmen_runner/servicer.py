"""Serves `fulmen.runner.v1.RunnerService`."""

import time
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.runner.v1 import runner_service_pb2 as messages
from fulmen.runner.v1 import runner_service_pb2_grpc
from fulmen_runner.attempts.drain import Drain
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.slots.control import SlotChange
from fulmen_runner.slots.keeper import SlotKeeper
from fulmen_runner.stacks import stacks_text
from fulmen_service_kit.isolation.launch import Isolator

MAX_SLOTS = 10_000


class RunnerServicer(runner_service_pb2_grpc.RunnerServiceServicer):
    """Implements the runner's rpcs."""

    def __init__(
        self, *, pool: AttemptPool, drain: Drain, keeper: SlotKeeper, isolator: Isolator, version: str
    ) -> None:
        self._pool = pool
        self._session = pool.session
        self._drain = drain
        self._keeper = keeper
        self._isolator = isolator
        self._version = version

    async def GetStatus(self, request: messages.GetStatusRequest, context: Any) -> messages.GetStatusResponse:
        """Returns the runner's status."""
        running = []
        for attempt, run in self._session.running.items():
            running.append(messages.RunningAttempt(attempt=attempt, start_time=_timestamp(run.start_unix_s)))
        control = self._keeper.control
        slots = messages.SlotStatus(
            automatic=control.automatic, min_count=control.policy.min_slots, max_count=control.policy.max_slots
        )
        if control.last_change is not None:
            slots.last_change.CopyFrom(_change(control.last_change))
        return messages.GetStatusResponse(
            runner=self._session.runner,
            slot_count=self._session.slots,
            running=running,
            completed_count=self._session.completed_count,
            draining=self._session.draining,
            slots=slots,
            straggler_count=len(self._pool.stragglers),
            unacknowledged_count=self._session.unacknowledged_count,
            version=self._version,
            isolation=self._isolator.floor.value,
            isolation_layers=[] if self._isolator.problem else self._isolator.layers,
            isolation_problem=self._isolator.problem,
        )

    async def Drain(self, request: messages.DrainRequest, context: Any) -> messages.DrainResponse:
        """Starts draining; the process exits when done."""
        grace_s = None
        if request.HasField("grace"):
            grace_s = request.grace.ToTimedelta().total_seconds()
            if grace_s < 0:
                raise _invalid("grace", "must not be negative")
        self._drain.start(grace_s)
        return messages.DrainResponse(running_count=len(self._session.running))

    async def SetSlots(self, request: messages.SetSlotsRequest, context: Any) -> messages.SetSlotsResponse:
        """Sets the number of slots, or switches to automatic."""
        if request.automatic:
            if request.slot_count:
                raise _invalid("slot_count", "must be 0 with `automatic`")
            self._keeper.automate()
        elif 1 <= request.slot_count <= MAX_SLOTS:
            self._keeper.fix(request.slot_count)
        else:
            raise _invalid("slot_count", f"must be between 1 and {MAX_SLOTS}")
        return messages.SetSlotsResponse(slot_count=self._session.slots, automatic=self._keeper.control.automatic)

    async def DumpStacks(self, request: messages.DumpStacksRequest, context: Any) -> messages.DumpStacksResponse:
        """Returns the stacks of all threads and tasks."""
        return messages.DumpStacksResponse(text=stacks_text())


def _change(change: SlotChange) -> messages.SlotChange:
    unix_s = time.time() - (time.monotonic() - change.at_s)
    return messages.SlotChange(
        time=_timestamp(unix_s), from_count=change.before, to_count=change.after, reason=change.reason.value
    )


def _timestamp(unix_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(int(unix_s * 1e9))
    return timestamp


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("request is invalid", violations=[Violation(field=field, description=description)])
