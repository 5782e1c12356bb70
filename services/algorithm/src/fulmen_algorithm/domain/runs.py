"""The runs of the service: all of them in memory, each change on disk before anyone sees it.

Invariant: at most one run is active at a time; the others wait for their turn in the order in which they were created.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fulmen.errors import TrainingRunExists, TrainingRunNotFound, TrainingRunStateInvalid
from fulmen_algorithm.domain.control import RunControl, StopReason
from fulmen_algorithm.domain.creation import RunDraft, digest
from fulmen_algorithm.domain.events import Clock, EventFile, EventLog
from fulmen_algorithm.domain.run import RunState, TrainingRun, moved

CHANGEABLE = frozenset({"results", "step", "policy_version", "model_path", "resume_requested"})


class RunFile(EventFile, Protocol):
    """Where a run and its events are kept."""

    def save_run(self, run: TrainingRun) -> None:
        """Replaces what is kept of the run."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One run, with its events and its file."""

    run: TrainingRun
    events: EventLog
    file: RunFile


@dataclass(slots=True, kw_only=True)
class Active:
    """The run whose turn it is."""

    name: str
    control: RunControl
    task: "asyncio.Task[None]"
    cancelled: bool = False


class Runs:
    """All runs, and the queue."""

    def __init__(self, *, open_file: Callable[[str], RunFile], clock: Clock) -> None:
        """`open_file` makes the file of a run id."""
        self._open_file = open_file
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._changed = asyncio.Event()
        self.active: Active | None = None

    def adopt(self, run: TrainingRun, file: RunFile) -> None:
        """Takes a run over that a process before has kept."""
        self._entries[run.name] = Entry(run=run, events=EventLog(file, self._clock), file=file)

    def existing(self, draft: RunDraft) -> TrainingRun | None:
        """Finds the run that an earlier, equal request has created.

        Raises:
            TrainingRunExists: if the name or the request id belongs to a different run.
        """
        for entry in self._entries.values():
            run = entry.run
            same_request = bool(draft.request_id) and (run.request_id, run.project) == (draft.request_id, draft.project)
            if run.name == draft.name or same_request:
                if run.request_digest != digest(draft):
                    raise TrainingRunExists(
                        "The name or request id is taken by a different run.", training_run=run.name
                    )
                return run
        return None

    def add(self, run: TrainingRun) -> None:
        """Keeps a new run; it waits for its turn from now on."""
        file = self._open_file(run.run_id)
        file.save_run(run)
        self.adopt(run, file)
        self._entries[run.name].events.state_changed(run)
        self._wake()

    def entry(self, name: str) -> Entry:
        """Returns a run with its events.

        Raises:
            TrainingRunNotFound: if there is none.
        """
        if name not in self._entries:
            raise TrainingRunNotFound("There is no such training run.", training_run=name[:128])
        return self._entries[name]

    def newest_first(self, project: str) -> list[TrainingRun]:
        """Lists the runs of a project."""
        runs = [e.run for e in self._entries.values() if e.run.project == project]
        return sorted(runs, key=lambda r: (r.create_time, r.name), reverse=True)

    def update(self, name: str, changes: Mapping[str, object]) -> None:
        """Changes figures of a run; its state changes by `move` only.

        The step alone is not written: it is in the checkpoint, and a write for each step would cost more than the step.
        """
        entry = self.entry(name)
        if unknown := set(changes) - CHANGEABLE:
            raise ValueError(f"These fields do not change by update: {sorted(unknown)}.")
        entry.run = replace(entry.run, **changes)  # type: ignore[arg-type]  # the names were checked
        if set(changes) != {"step"}:
            entry.file.save_run(entry.run)

    def move(self, name: str, state: RunState, *, failure_message: str = "") -> TrainingRun:
        """Changes the state of a run and announces it.

        Raises:
            TrainingRunStateInvalid: if the state cannot follow the present one.
        """
        entry = self.entry(name)
        entry.run = moved(entry.run, state, now=self._clock(), failure_message=failure_message)
        entry.file.save_run(entry.run)
        entry.events.state_changed(entry.run)
        self._wake()
        return entry.run

    async def next_turn(self) -> TrainingRun:
        """Waits for a run that may go on: one that was running when the service stopped goes first, then the oldest."""
        while True:
            changed = self._changed
            waiting = [e.run for e in self._entries.values() if e.run.runnable]
            if waiting:
                return min(waiting, key=lambda r: (r.state is not RunState.RUNNING, r.create_time, r.name))
            await changed.wait()

    def pause(self, name: str) -> TrainingRun:
        """Asks a running run to stop at a checkpoint; a paused one stays as it is.

        Raises:
            TrainingRunStateInvalid: if it is neither.
        """
        run = self.entry(name).run
        if run.state is RunState.PAUSED:
            self.update(name, {"resume_requested": False})
        elif run.state is RunState.RUNNING and self.active is not None and self.active.name == name:
            self.active.control.request(StopReason.PAUSE)
        else:
            raise TrainingRunStateInvalid(f"A run that is {run.state} cannot be paused.", state=run.state)
        return self.entry(name).run

    def resume(self, name: str) -> TrainingRun:
        """Lets a paused run go on when it is its turn; takes back a pause that was not heard yet.

        Raises:
            TrainingRunStateInvalid: if it is neither paused nor running.
        """
        run = self.entry(name).run
        if run.state is RunState.PAUSED:
            self.update(name, {"resume_requested": True})
            self._wake()
        elif run.state is RunState.RUNNING:
            if self.active is not None and self.active.name == name:
                self.active.control.withdraw()
        else:
            raise TrainingRunStateInvalid(f"A run that is {run.state} cannot be resumed.", state=run.state)
        return self.entry(name).run

    async def ended(self, name: str, *, deadline_s: float) -> TrainingRun:
        """Waits until a run is final, but not for ever; returns it as it is then."""
        entry = self.entry(name)
        try:
            async with asyncio.timeout(deadline_s):
                while not entry.run.state.final:
                    await self._changed.wait()
        except TimeoutError:
            return entry.run
        return entry.run

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
