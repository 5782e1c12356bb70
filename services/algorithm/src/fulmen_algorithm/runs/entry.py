"""A run of the service: its present state, its events and its files.

Events are numbered from 1 without gaps, durable before they are visible, and immutable. The log is the run's history:
steps that are repeated after a crash appear again, after a notice. Events of active runs are in memory; those of ended
runs are only on disk, and read on request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.events import Event, Notice, StepMetrics
from fulmen_algorithm.runs.run import TrainingRun

CHANGEABLE = frozenset({"results", "step", "step_count", "policy_version", "model_path", "provenance"})
Clock = Callable[[], datetime]
READ_AT_ONCE = 1000
"""Events of an ended run that a watcher reads into memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The events in memory; replaced as a whole for a consistent view from threads.

    Attributes:
        before: Number of older events, which are only on disk.
        events: Newer events; append-only.
    """

    before: int
    events: list[Event]

    @property
    def last_sequence(self) -> int:
        return self.before + len(self.events)


class EventLog:
    """The events of one run; `steps`, `steps_between` and `notices` read the disk and may be called in a thread."""

    def __init__(self, files: RunFiles, clock: Clock, *, ended: bool = False) -> None:
        """Reads the existing events; only the newest one of a run that has `ended`."""
        self._files = files
        self._clock = clock
        self._newest: Mapping[str, float] = {}
        self._over = ended
        if ended:
            last = files.read_last()
            self._held = _Held(before=0 if last is None else last.sequence, events=[])
        else:
            events = files.read()
            self._held = _Held(before=0, events=events)
            self._newest = {k: v for event in events if event.step is not None for k, v in event.step.values.items()}
            self._over = next((event.last for event in reversed(events) if event.run is not None), False)
        self._grown = asyncio.Event()

    def state_changed(self, run: TrainingRun) -> None:
        """Appends the present state of the run."""
        self._append(Event(sequence=self._next, time=self._clock(), run=run))

    def step_done(self, metrics: StepMetrics) -> None:
        """Appends the metrics of a step."""
        self._append(Event(sequence=self._next, time=self._clock(), step=metrics))
        self._newest = {**self._newest, **metrics.values}

    def notify(self, severity: str, message: str) -> None:
        """Appends a message for a person."""
        self._append(Event(sequence=self._next, time=self._clock(), notice=Notice(severity=severity, message=message)))

    def steps(self) -> list[StepMetrics]:
        """Returns the metrics by step, in order. Measurements are merged; of a repeated step, the last one counts.

        Steps undone by a rollback are left out until they are repeated.
        """
        merged: dict[int, dict[str, float]] = {}
        branch = 0
        for event in self._between(0, self.last_sequence):
            if event.run is not None and len(event.run.branch_points) > branch:
                branch = len(event.run.branch_points)
                merged = {step: values for step, values in merged.items() if step <= event.run.step}
            if event.step is None:
                continue
            values = merged.setdefault(event.step.step, {})
            values.update(event.step.values)
        return [StepMetrics(step=step, values=values) for step, values in sorted(merged.items())]

    def steps_between(self, after: int, upto: int) -> list[StepMetrics]:
        """Returns the metrics of the events after one sequence up to another, unmerged."""
        return [event.step for event in self._between(after, upto) if event.step is not None]

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest event; 0 without events."""
        return self._held.last_sequence

    @property
    def latest_metrics(self) -> Mapping[str, float]:
        """The newest value of every metric; empty for a run that had ended when the service started."""
        return self._newest

    def notices(self) -> list[Notice]:
        """Returns the messages so far."""
        return [event.notice for event in self._between(0, self.last_sequence) if event.notice is not None]

    async def follow(self, after_sequence: int) -> AsyncIterator[Event]:
        """Yields the events after a sequence, waits for more, and ends when the run has ended.

        It has no timeout; the caller's applies.
        """
        position = min(max(after_sequence, 0), self.last_sequence)
        while True:
            grown = self._grown
            while position < self.last_sequence:
                events = self._between(position, self.last_sequence)
                while piece := await self._piece(events, position):
                    for event in piece:
                        position = event.sequence
                        yield event
            if self._over:
                return
            await grown.wait()

    def _between(self, after: int, upto: int) -> Iterator[Event]:
        """Yields the events after one sequence up to another, from memory or disk."""
        held = self._held
        if after < held.before:
            yield from self._files.read_between(after, min(upto, held.before))
        yield from held.events[max(after - held.before, 0) : max(upto - held.before, 0)]

    async def _piece(self, events: Iterator[Event], position: int) -> list[Event]:
        """Returns the next events after a position, in a thread if they are read from disk."""
        if position < self._held.before:
            return await asyncio.to_thread(lambda: list(islice(events, READ_AT_ONCE)))
        return list(islice(events, READ_AT_ONCE))

    @property
    def _next(self) -> int:
        return self.last_sequence + 1

    def _append(self, event: Event) -> None:
        self._files.append(event)
        self._over = event.last if event.run is not None else self._over
        if self._over:
            self._held = _Held(before=event.sequence, events=[])
        else:
            self._held.events.append(event)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


@dataclass(slots=True, kw_only=True)
class Entry:
    """A run with its events and its files."""

    run: TrainingRun
    events: EventLog
    files: RunFiles

    def update(self, **changes: object) -> None:
        """Changes fields of the run other than its state, which only `RunRegistry.move` changes.

        A change of the step alone is not written: the checkpoint has it, and a write per step would be too slow.
        """
        if unknown := set(changes) - CHANGEABLE:
            raise ValueError(f"These fields do not change by update: {sorted(unknown)}.")
        self.run = replace(self.run, **changes)  # type: ignore[arg-type]  # the names were checked
        if set(changes) != {"step"}:
            self.files.save_run(self.run)
