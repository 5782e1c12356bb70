"""The runs that the service knows: all in memory, each change durable before it is visible.

Invariant: at most `max_concurrent` runs are active at a time, and no two of them train the same policy, on this service
or another; the others wait for a slot. A free slot goes to the project with the fewest active runs, and there to the
oldest run. A stage waits until the one before it has ended; one that does not begin needs no slot to end. A stage that failed
with the one before it waits again when that one was rolled back.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

import structlog

from fulmen.errors import (
    ArgumentInvalid,
    QuotaExceeded,
    TrainingRunExists,
    TrainingRunNotFound,
    TrainingRunStateInvalid,
    Violation,
)
from fulmen.ids import MAX_TRAINING_RUN
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.control import RunControl, StopReason
from fulmen_algorithm.runs.creation.rules import RunDraft, digest
from fulmen_algorithm.runs.entry import Clock, Entry, EventLog
from fulmen_algorithm.runs.run import RunState, TrainingRun, moved, rolled_back, waiting_again
from fulmen_algorithm.runs.stages import continued

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class ActiveRun:
    """A run that occupies a slot."""

    name: str
    project: str
    policy: str
    control: RunControl
    task: "asyncio.Task[None]"
    cancelled: bool = False
    lost: bool = False


class RunRegistry:
    """All runs, and the queue."""

    def __init__(
        self, storage: RunStorage, *, clock: Clock, max_concurrent: int = 1, max_of_project: int = 256
    ) -> None:
        """`max_concurrent` is the number of run slots, `max_of_project` the maximum number of a project's runs that have
        not ended."""
        self._max_of_project = max_of_project
        self._storage = storage
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._changed = asyncio.Event()
        self._max_concurrent = max_concurrent
        self._notified: set[tuple[str, str]] = set()
        self.active: dict[str, ActiveRun] = {}

    def restore(self, run: TrainingRun, files: RunFiles) -> Entry:
        """Restores a stored run, or one of another service."""
        entry = Entry(
            run=run,
            events=EventLog(files, self._clock, ended=run.state.final),
            files=files,
            owner=files.owner,
            newest_epoch=files.epoch,
        )
        self._entries[run.name] = entry
        return entry

    def restore_readable(self, run: TrainingRun, files: RunFiles) -> Entry | None:
        """Restores a run; one whose events cannot be read stays as it is, for a person to repair, and None is returned."""
        try:
            return self.restore(run, files)
        except ValueError as error:
            _log.error("run_files_damaged", run=run.name, error=type(error).__name__)
            return None

    def existing(self, stages: Sequence[RunDraft]) -> TrainingRun | None:
        """Finds the first run created by an earlier equal request.

        Raises:
            TrainingRunExists: if a name or the request id belongs to a different run of the project.
        """
        draft = stages[0]
        for entry in self._entries.values():
            run = entry.run
            if run.project != draft.project:
                continue
            if run.name == draft.name or (draft.request_id and run.request_id == draft.request_id):
                if run.request_digest != digest(*stages):
                    raise TrainingRunExists(
                        "The name or request id is taken by a different run.", training_run=run.name
                    )
                return run
        for name in (each.name for each in stages):
            if name in self._entries and self._entries[name].run.project == draft.project:
                raise TrainingRunExists("The name is taken by a different run.", training_run=name)
        return None

    def require_room(self, project: str, count: int) -> None:
        """Checks that a project may have further runs.

        Raises:
            QuotaExceeded: if too many would not have ended.
        """
        runs = (entry.run for entry in self._entries.values())
        held = sum(run.project == project and not run.state.final for run in runs)
        if held + count > self._max_of_project:
            raise QuotaExceeded(
                f"{held} runs of {project} have not ended; at most {self._max_of_project} are allowed at the same time (project_max_runs). "
                "Wait for one, or cancel it; an operator can raise the limit.",
                project=project,
                quota="project_runs",
            )

    def add(self, run: TrainingRun) -> None:
        """Stores a new run, which then waits for a slot.

        Raises:
            OSError: if the storage is full; another service or the next start of this one creates its files then.
        """
        # Not the newest epoch: another service may have acquired the run already.
        files = self._storage.run_files(run, epoch=0)
        entry = self.restore(run, files)
        self.wake()
        files.begin(self._storage.owner)
        files.save_run(run)
        entry.owner = files.owner
        entry.events.state_changed(run)

    def entry(self, name: str) -> Entry:
        """Returns a run with its events.

        Raises:
            TrainingRunNotFound: if it does not exist.
        """
        if name not in self._entries:
            raise unknown_run(name)
        return self._entries[name]

    def owner_of(self, name: str) -> str:
        """Returns the address of the service that runs a run; empty if this one does, or none.

        Raises:
            TrainingRunNotFound: if it does not exist.
        """
        entry = self.entry(name)
        return entry.owner_address if entry.elsewhere else ""

    def find(self, name: str) -> Entry | None:
        """Returns a run; None if it is unknown."""
        return self._entries.get(name)

    def is_own(self, entry: Entry) -> bool:
        """Returns whether this service is the last one that wrote a run's files."""
        return entry.owner == self._storage.owner and not entry.stale

    def has(self, name: str) -> bool:
        """Returns whether there is a run of this name."""
        return name in self._entries

    def is_over(self, name: str) -> bool:
        """Returns whether there is a run of this name and it has ended."""
        return name in self._entries and self._entries[name].run.state.final

    def entries(self) -> list[Entry]:
        """Lists all runs, in no particular order."""
        return list(self._entries.values())

    def newest_first(self, project: str) -> list[TrainingRun]:
        """Lists the runs of a project."""
        runs = [e.run for e in self._entries.values() if e.run.project == project]
        return sorted(runs, key=lambda r: (r.create_time, r.name), reverse=True)

    def move(self, name: str, state: RunState, *, failure_message: str = "") -> TrainingRun:
        """Changes the state of a run and announces it.

        Raises:
            TrainingRunStateInvalid: if the state cannot follow the present one.
        """
        entry = self.entry(name)
        return self._changed_to(entry, moved(entry.run, state, now=self._clock(), failure_message=failure_message))

    def wait_again(self, name: str) -> TrainingRun:
        """Lets a stage that failed with the one before it wait for that one; see `run.waiting_again`."""
        entry = self.entry(name)
        return self._changed_to(entry, waiting_again(entry.run))

    def rollback(self, name: str, *, sequence: int, step: int, collapsed: bool = False) -> TrainingRun:
        """Rolls a run back to a checkpoint, from which it resumes when it gets a slot; see `run.rolled_back`.

        Raises:
            TrainingRunStateInvalid: if its state does not allow it.
        """
        entry = self.entry(name)
        return self._changed_to(entry, rolled_back(entry.run, sequence=sequence, step=step, collapsed=collapsed))

    def describe(self, name: str, *, display_name: str | None, tags: Sequence[str] | None) -> TrainingRun:
        """Changes the display name and the tags of a run; None leaves them.

        Raises:
            OSError: if the storage is full.
        """
        entry = self.entry(name)
        run = entry.run
        entry.run = replace(
            run,
            display_name=run.display_name if display_name is None else display_name,
            tags=run.tags if tags is None else tuple(tags),
        )
        entry.files.save_run(entry.run)
        return entry.run

    def _changed_to(self, entry: Entry, run: TrainingRun) -> TrainingRun:
        """Stores a run in another state and announces it."""
        entry.run = run
        entry.files.save_run(entry.run)
        entry.events.state_changed(entry.run)
        self.wake()
        return entry.run

    async def next_runnable(self) -> TrainingRun:
        """Waits for a run that can start, or a stage that is to wait again; runs interrupted by a restart are first."""
        while True:
            changed = self._changed
            unowned = [e for e in self._entries.values() if e.run.name not in self.active]
            unowned = [e for e in unowned if not e.elsewhere and not e.changing.locked()]
            if again := [e.run for e in unowned if self.waits_again(e) and not _blocked(e)]:
                return again[0]
            waiting = [e for e in unowned if e.run.runnable and not self.waits_for_stage(e)]
            free = [entry.run for entry in waiting if not self._policy_taken(entry) and not _blocked(entry)]
            if unbegun := [run for run in free if self._never_begins(run)]:
                return unbegun[0]
            if free and len(self.active) < self._max_concurrent:
                return min(free, key=self._order)
            for run in free:
                text = f"Waiting for a run slot: {len(self.active)} runs are active (max_concurrent_runs)."
                self._notify_waiting(self._entries[run.name], "", text)
            await changed.wait()

    def begin(self, active: ActiveRun) -> None:
        """Marks a run as active."""
        self.active[active.name] = active

    def end(self, name: str) -> None:
        """Releases the slot of a run."""
        del self.active[name]
        self.wake()

    async def idle(self) -> None:
        """Waits until no run is active; the caller sets the timeout."""
        while self.active:
            await self._changed.wait()

    def _order(self, run: TrainingRun) -> tuple[bool, int, datetime, str]:
        """Sorts waiting runs: smaller is sooner."""
        siblings = sum(active.project == run.project for active in self.active.values())
        return run.state is not RunState.RUNNING, siblings, run.create_time, run.name

    def trains_elsewhere(self, policy: str, project: str) -> bool:
        """Returns whether an unfinished run of another project trains a policy of this name."""
        runs = (entry.run for entry in self._entries.values() if not entry.run.state.final)
        return any(run.policy.name == policy and run.project != project for run in runs)

    def waits_for_stage(self, entry: Entry) -> bool:
        """Returns whether a run is a stage that has not begun, and the one before it has not ended."""
        before = self._stage_before(entry.run)
        return before is not None and not entry.run.state.final and not before.state.final

    def waits_again(self, entry: Entry) -> bool:
        """Returns whether a run is a stage that failed with the one before it, and that one no longer is failed."""
        before = self._stage_before(entry.run) if entry.run.failed_unbegun else None
        return before is not None and before.state not in (RunState.FAILED, RunState.CANCELLED)

    def misses_stage(self, run: TrainingRun) -> bool:
        """Returns whether a run is a stage that has not begun, and the one before it is not known."""
        return bool(run.stages_before) and run.start_time is None and run.stages_before[-1] not in self._entries

    def continue_stages(self, entry: Entry) -> None:
        """Lets a stage that has not begun start where the stages before it have ended.

        Raises:
            StageNotBegun: if the one before it has not succeeded.
        """
        run = entry.run
        if run.stages_before and run.start_time is None:
            entry.run = continued(run, [self._entries[name].run for name in run.stages_before if self.has(name)])

    def _never_begins(self, run: TrainingRun) -> bool:
        before = self._stage_before(run)
        return before is not None and before.state is not RunState.SUCCEEDED

    def _stage_before(self, run: TrainingRun) -> TrainingRun | None:
        """Returns the stage before one that has not begun; None for other runs."""
        entry = self._entries.get(run.stages_before[-1]) if run.stages_before and run.start_time is None else None
        return None if entry is None else entry.run

    def _policy_taken(self, waiting: Entry) -> bool:
        """Returns whether an active run trains the same policy; the waiting run is notified once."""
        policy = waiting.run.policy.name
        elsewhere = (
            entry.run.name for entry in self._entries.values() if policy == entry.run.policy.name and entry.elsewhere
        )
        here = (active.name for active in self.active.values() if active.policy == policy)
        other = next(chain(here, elsewhere), None) if policy else None
        if other is None:
            return False
        run = self._entries[other].run
        end = f"`fulmen run stop {run.run_id}` ends that one"
        text = f"Waits for {other}, which trains the same policy {policy!r}; {end}."
        if run.project != waiting.run.project:
            text = f"Waits for a run of another project, whose policy has the same name {policy!r}."
        self._notify_waiting(waiting, other, text)
        return True

    def _notify_waiting(self, waiting: Entry, behind: str, text: str) -> None:
        """Notifies a run once that it waits: for another run, or for any slot if `behind` is empty."""
        if (waiting.run.name, behind) not in self._notified and self.is_own(waiting):
            self._notified.add((waiting.run.name, behind))
            waiting.events.notify("info", text)

    def pause(self, name: str) -> TrainingRun:
        """Asks an active run to stop at a checkpoint; a waiting run is paused immediately, a paused run is unchanged.

        Raises:
            TrainingRunStateInvalid: if it has ended.
        """
        run = self.entry(name).run
        if name in self.active and run.runnable:
            self.active[name].control.request(StopReason.PAUSE)
        elif run.runnable:
            self.move(name, RunState.PAUSED)
        elif run.state is not RunState.PAUSED:
            raise TrainingRunStateInvalid(f"A run that is {run.state} cannot be paused.", state=run.state)
        return self.entry(name).run

    def resume(self, name: str, *, pause_at_step: int = 0) -> TrainingRun:
        """Lets a paused run wait for a slot; withdraws a pause that has not taken effect.

        Args:
            name: The run.
            pause_at_step: Step after which it pauses again; 0 for none.

        Raises:
            TrainingRunStateInvalid: if it has ended.
            ArgumentInvalid: if it has done that step.
        """
        entry = self.entry(name)
        run = entry.run
        if pause_at_step and pause_at_step <= run.step:
            text = f"must be more than {run.step}, the steps that the run has completed"
            raise ArgumentInvalid(
                "The request is malformed.", violations=[Violation(field="pause_at_step", description=text)]
            )
        if run.state is RunState.PAUSED:
            pending = moved(run, RunState.PENDING, now=self._clock())
            self._changed_to(entry, replace(pending, pause_at_step=pause_at_step))
        elif run.runnable:
            entry.update(pause_at_step=pause_at_step)
            if name in self.active:
                self.active[name].control.withdraw()
        else:
            raise TrainingRunStateInvalid(f"A run that is {run.state} cannot be resumed.", state=run.state)
        return self.entry(name).run

    async def wait_final(self, name: str, *, timeout_s: float) -> TrainingRun:
        """Waits until a run is final, but not for ever; returns it as it is then."""
        entry = self.entry(name)
        try:
            async with asyncio.timeout(timeout_s):
                while not entry.run.state.final:
                    await self._changed.wait()
        except TimeoutError:
            return entry.run
        return entry.run

    def wake(self) -> None:
        """Wakes everyone who waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def wake_later(self, delay_s: float) -> None:
        """Wakes after a time, in seconds."""
        asyncio.get_running_loop().call_later(delay_s, self.wake)


def unknown_run(name: str) -> TrainingRunNotFound:
    """Returns the error for a name of no run; also for a run of another project, which must look the same."""
    return TrainingRunNotFound("The training run does not exist.", training_run=name[:MAX_TRAINING_RUN])


def _blocked(entry: Entry) -> bool:
    return time.monotonic() < entry.blocked_until
