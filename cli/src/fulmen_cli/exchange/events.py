"""The gradient exchange of a training run as its events show it: latest metrics and decisions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.errors import FulmenError
from fulmen.rpc.services import Services
from fulmen.training.following import follow_run
from fulmen_cli.exits import CommandFailed

__all__ = ["PREFIX", "Metric", "Notice", "ExchangeEvents", "follow_events"]

PREFIX: Final = "exchange_"
TIMES: Final = ("spent_exchange_seconds", "spent_train_seconds")
NOTICE_PREFIX: Final = "exchange: "
NOTICES_KEPT: Final = 10
FIRST_LIMIT_S: Final = 10.0
SILENT_S: Final = 2.0
QUIET_S: Final = 0.3
POLL_INTERVAL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The latest value of a metric, and its step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message about the exchange in the run's history."""

    time: datetime
    severity: str
    message: str


@dataclass(slots=True, kw_only=True)
class ExchangeEvents:
    """A run's exchange, up to the latest event.

    Attributes:
        run: As it is now.
        step: The newest that was measured.
        metrics: By name, `exchange_*`, and what the run has spent on exchanges and on training besides.
        notices: The newest, oldest first.
        problem: Message while the service is unreachable; empty otherwise.
    """

    run: training_run_pb2.TrainingRun
    step: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict)
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=NOTICES_KEPT))
    problem: str = ""
    _asked: training_run_pb2.TrainingRun = field(init=False)
    _branch: int = 0
    _failure: Exception | None = None

    def __post_init__(self) -> None:
        """Stores the run; its step determines how far its events must be read."""
        self._asked = self.run

    @property
    def any_exchange(self) -> bool:
        """Whether there is any metric of an exchange."""
        return any(name.startswith(PREFIX) for name in self.metrics)

    @property
    def share(self) -> Metric | None:
        """Share of the training time spent on exchanges so far."""
        times = [self.metrics[name] for name in TIMES if name in self.metrics]
        total = sum(time.value for time in times)
        if len(times) < len(TIMES) or total <= 0:
            return None
        return Metric(step=times[0].step, value=times[0].value / total)

    @property
    def is_current(self) -> bool:
        """Whether the events have reached the step of the run as it was read; a step may have no event."""
        return self._branch >= self._asked.rollback_count and self.step >= self._asked.step

    def check(self) -> None:
        """Raises if the events can no longer be followed.

        Raises:
            CommandFailed: if the service could not be reached for 3 minutes.
            FulmenError: if it refused.
        """
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> None:
        """Marks the end of the events."""
        self._failure = error

    def add(self, event: training_run_pb2.TrainingRunEvent) -> None:
        """Applies the next event."""
        self.problem = ""
        match event.WhichOneof("event"):
            case "run":
                if event.run.rollback_count > self._branch:
                    self._branch, self.step = event.run.rollback_count, event.run.step
                    self.metrics = {name: one for name, one in self.metrics.items() if one.step <= self.step}
                self.run = event.run
            case "step":
                self.step = event.step.step
                self.metrics |= {
                    name: Metric(step=event.step.step, value=value)
                    for name, value in event.step.values.items()
                    if name.startswith(PREFIX) or name in TIMES
                }
            case "notice" if event.notice.message.startswith(NOTICE_PREFIX):
                message = event.notice.message.removeprefix(NOTICE_PREFIX)
                time = event.event_time.ToDatetime(UTC)
                self.notices.append(Notice(time=time, severity=event.notice.severity, message=message))


@asynccontextmanager
async def follow_events(client: Services, run: training_run_pb2.TrainingRun) -> AsyncIterator[ExchangeEvents]:
    """Yields the events of a run up to now, and follows them while the context is open. See `ExchangeEvents.check`."""
    events = ExchangeEvents(run=run)
    left_s = FIRST_LIMIT_S

    def interrupted(message: str) -> None:
        events.problem = message

    async def follow() -> None:
        nonlocal left_s
        try:
            async for event in follow_run(client, run.name, on_interruption=interrupted):
                events.add(event)
                left_s = QUIET_S if events.is_current else SILENT_S
        except (CommandFailed, FulmenError) as error:
            events.fail(error)

    following = asyncio.create_task(follow(), name="exchange-events")
    try:
        # Only a run that has ended has a last event; nothing marks the newest one of a run that continues. Intervals are
        # counted instead of reading the clock: events cannot arrive while this process is suspended.
        while not following.done() and left_s > 0:
            await asyncio.wait({following}, timeout=POLL_INTERVAL_S)
            left_s -= POLL_INTERVAL_S
        events.check()
        yield events
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
