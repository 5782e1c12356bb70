"""A run of the service: its present state, its events and its files.

Events are numbered from 1 without gaps, durable before they are visible, and immutable. The log is the run's history:
steps that are repeated after a crash appear again, after a notice. Events of active runs are in memory; those of ended
runs are only on disk, and read on request.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

import structlog

from fulmen.errors import Draining
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.events import Event, Notice, StepMetrics
from fulmen_algorithm.runs.ports import LeaseState, RunFence
from fulmen_algorithm.runs.run import RunState, TrainingRun, sendable

_log = structlog.get_logger()
CHANGEABLE = frozenset(
    {"results", "step", "step_count", "policy_version", "prompt_version", "model_path", "provenance", "pause_at_step"}
)
Clock = Callable[[], datetime]
NOTICES_POSTPONED = 100
"""Notices that wait in memory while the storage is full."""
READ_AT_ONCE = 1000
"""Events of an ended run that a watcher reads into memory at a time."""


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
        self._postponed: deque[Notice] = deque(maxlen=NOTICES_POSTPONED)
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
        self._moved = False

    def switch(self, files: RunFiles, *, ended: bool) -> None:
        """Continues with the files of another epoch; watchers stay."""
        fresh = EventLog(files, self._clock, ended=ended)
        self._files, self._held, self._newest, self._over = files, fresh._held, fresh._newest, fresh._over
        self._moved = False
        self._wake()

    def move(self) -> None:
        """Ends the watches of a run that another service runs now; their callers reconnect and are sent there."""
        self._moved = True
        self._wake()

    def state_changed(self, run: TrainingRun) -> None:
        """Appends the present state of the run."""
        self._append(Event(sequence=self._next, time=self._clock(), run=run))

    def step_done(self, metrics: StepMetrics) -> None:
        """Appends the metrics of a step."""
        self._append(Event(sequence=self._next, time=self._clock(), step=metrics))
        self._newest = {**self._newest, **metrics.values}

    def notify(self, severity: str, message: str) -> None:
        """Appends a message for a person; a full disk does not stop its caller."""
        notice = Notice(severity=severity, message=sendable(message))
        try:
            self._append(Event(sequence=self._next, time=self._clock(), notice=notice))
        except OSError:
            _log.warning("run_notice_not_stored", severity=severity, text=message)
            self._postponed.append(notice)

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

    def piece(self, after: int, limit: int) -> list[Event]:
        """Returns the first events after a sequence; may be called in a thread."""
        return list(islice(self._between(after, min(after + limit, self.last_sequence)), limit))

    def branches_at(self, sequence: int) -> int:
        """Returns how often the run had been rolled back at an event; reads all before it, and may be called in a thread."""
        runs = [event.run for event in self._between(0, sequence) if event.run is not None]
        return len(runs[-1].branch_points) if runs else 0

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

        Raises:
            Draining: if another service runs the run now.
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
            if self._moved:
                raise Draining("Another service now owns this run: watch it again.")
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
        while self._postponed:
            late = Event(sequence=self._next, time=event.time, notice=self._postponed[0])
            self._store(late)
            self._postponed.popleft()
        self._store(replace(event, sequence=self._next))

    def _store(self, event: Event) -> None:
        self._files.append(event)
        self._over = event.last if event.run is not None else self._over
        if self._over:
            self._held = _Held(before=event.sequence, events=[])
        else:
            self._held.events.append(event)
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


@dataclass(slots=True, kw_only=True)
class Entry:
    """A run with its events, its files and its lease.

    Attributes:
        run: The run as of its files, or as its owner last described it.
        epoch: Epoch under which this service runs it; 0 if it does not.
        owner: Id of the last owner.
        owner_address: Address of the last owner.
        newest_epoch: The newest epoch that this service knows of.
        held_until: Time until which the last owner holds the lease, by `time.monotonic`.
        blocked_until: Time before which this service does not try to acquire the run, by `time.monotonic`.
        waiting_reason: What an active run waits for; empty if it does not wait.
        is_out_of_reach: Whether the run's files are in a storage that this service does not have.
        changing: Held while the run is acquired or released.
    """

    run: TrainingRun
    events: EventLog
    files: RunFiles
    epoch: int = 0
    owner: str = ""
    owner_address: str = ""
    newest_epoch: int = 0
    held_until: float = 0.0
    blocked_until: float = 0.0
    waiting_reason: str = ""
    is_out_of_reach: bool = False
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def elsewhere(self) -> bool:
        """Whether another service holds the run's lease, or alone has its files."""
        return not self.epoch and (self.is_out_of_reach or time.monotonic() < self.held_until)

    @property
    def stale(self) -> bool:
        """Whether another service has written the run since its files were opened here."""
        return not self.epoch and self.newest_epoch > self.files.epoch

    @property
    def fence(self) -> RunFence:
        """The epoch under which this service acts for the run."""
        return RunFence(training_run=self.run.name, epoch=self.epoch)

    @property
    def lease_state(self) -> LeaseState:
        """What the run is for its owners."""
        match self.run.state:
            case RunState.RUNNING:
                return LeaseState.RUNNING
            case RunState.PENDING:
                return LeaseState.WAITING
            case _:
                return LeaseState.IDLE

    def open(self, files: RunFiles) -> None:
        """Continues with the files of another epoch."""
        self.run = files.load_run() or self.run
        self.files = files
        self.events.switch(files, ended=self.run.state.final)

    def update(self, **changes: object) -> None:
        """Changes fields of the run other than its state, which only `RunRegistry.move` changes.

        A change of the step alone is not written: the checkpoint has it, and a write per step would be too slow.
        """
        if unknown := set(changes) - CHANGEABLE:
            raise ValueError(f"These fields cannot be updated: {sorted(unknown)}.")
        self.run = replace(self.run, **changes)  # type: ignore[arg-type]  # the names were checked
        if set(changes) != {"step"}:
            self.files.save_run(self.run)
