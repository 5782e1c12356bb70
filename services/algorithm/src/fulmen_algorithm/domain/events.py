"""A run's events: numbered from 1 without gaps, durable before anyone sees them, and never changed.

The log is the run's history: after a crash the steps that are done again appear again, after a notice that says so.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from fulmen_algorithm.domain.run import TrainingRun

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step measured; step 0 is what was measured before the first."""

    step: int
    values: Mapping[str, float]


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
        """Tells whether no event follows."""
        return self.run is not None and self.run.state.final


class EventFile(Protocol):
    """Where events are kept."""

    def read(self) -> list[Event]:
        """Returns the events so far; a line that a crash cut off is removed."""

    def append(self, event: Event) -> None:
        """Makes one event durable."""


class EventLog:
    """The events of one run, in memory and in its file."""

    def __init__(self, file: EventFile, clock: Clock) -> None:
        """Reads what is there."""
        self._file = file
        self._clock = clock
        self._events = file.read()
        self._grown = asyncio.Event()

    def state_changed(self, run: TrainingRun) -> None:
        """Appends the run as it is now."""
        self._append(Event(sequence=self._next, time=self._clock(), run=run))

    def step_done(self, metrics: StepMetrics) -> None:
        """Appends the figures of a step."""
        self._append(Event(sequence=self._next, time=self._clock(), step=metrics))

    def notify(self, severity: str, message: str) -> None:
        """Appends a message for a person."""
        self._append(Event(sequence=self._next, time=self._clock(), notice=Notice(severity=severity, message=message)))

    def steps(self) -> list[StepMetrics]:
        """Returns the figures by step, in order; of a step that was done again, the last; measurements are merged."""
        merged: dict[int, dict[str, float]] = {}
        for event in self._events:
            if event.step is None:
                continue
            values = merged.setdefault(event.step.step, {})
            values.update(event.step.values)
        return [StepMetrics(step=step, values=values) for step, values in sorted(merged.items())]

    def notices(self) -> list[Notice]:
        """Returns the messages so far."""
        return [event.notice for event in self._events if event.notice is not None]

    async def follow(self, after_sequence: int) -> AsyncIterator[Event]:
        """Yields the events after a sequence, waits for more, and ends after the one with the final state.

        The wait has no deadline of its own: it ends with the caller's.
        """
        position = min(max(after_sequence, 0), len(self._events))
        while True:
            grown = self._grown
            while position < len(self._events):
                event = self._events[position]
                position += 1
                yield event
            if self._events and self._events[-1].last:
                return
            await grown.wait()

    @property
    def _next(self) -> int:
        return len(self._events) + 1

    def _append(self, event: Event) -> None:
        self._file.append(event)
        self._events.append(event)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
