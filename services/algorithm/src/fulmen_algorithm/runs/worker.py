"""Background role: executes runs concurrently and sets the next state of each."""

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from fulmen.errors import BudgetExceeded, FulmenError, RunLeaseHeld, RunLeaseLost
from fulmen_algorithm.runs.collapse import RewardCollapsed
from fulmen_algorithm.runs.control import Interrupted, RunControl, StopReason
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.failure import AWAY, RunFailed
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import ActiveRun, RunRegistry
from fulmen_algorithm.runs.run import RunState, TrainingRun
from fulmen_algorithm.runs.stages import StageNotBegun
from fulmen_algorithm.runs.storage_wait import stored

_log = structlog.get_logger()

CANCEL_WAIT_S = 15.0
HELD_OR_AWAY: tuple[type[Exception], ...] = (RunLeaseHeld, *AWAY)


class NotAcquired(Exception):
    """The run is not started here: another service runs it, or it is not to be run any more."""


class Executor(Protocol):
    """Executes one run."""

    async def execute(self, entry: Entry, control: RunControl) -> None:
        """Runs or resumes a run to its end.

        Raises:
            Interrupted: if it was asked to stop; its checkpoint is written.
            RunFailed: if it cannot continue.
            FulmenError: if another service refused.
        """

    async def cancel_rollouts(self, entry: Entry) -> None:
        """Cancels the run's remaining rollouts; waits only briefly while the store is unavailable."""

    def hand_over(self, entry: Entry) -> None:
        """Leaves the policy of a run to another service, which runs it now."""


class RunWorker:
    """Executes as many runs at a time as `RunRegistry` has slots, under a lease each."""

    def __init__(self, runs: RunRegistry, executor: Executor, ownership: RunOwnership) -> None:
        self._runs = runs
        self._executor = executor
        self._ownership = ownership
        self._draining = False
        ownership.lost = self._lose
        ownership.ran_elsewhere = executor.hand_over

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as slots:
            while True:
                run = await self._runs.next_runnable()
                if self._draining:
                    await asyncio.Event().wait()  # until the role is cancelled
                slots.create_task(self._supervise(self._start(run)), name=f"run {run.name}")

    async def cancel(self, name: str) -> TrainingRun:
        """Ends a run and cancels its rollouts; idempotent.

        Raises:
            TrainingRunNotFound: if the run does not exist.
        """
        entry = self._runs.entry(name)
        active = self._runs.active.get(name)
        if active is not None:
            active.cancelled = True
            active.task.cancel()
            return await self._runs.wait_final(name, timeout_s=CANCEL_WAIT_S)
        if not entry.run.state.final:
            await self._cancel_waiting(entry)
        return entry.run

    async def changed(self, name: str, change: Callable[[], TrainingRun]) -> TrainingRun:
        """Makes a change of a run that may be active; a run that is not is owned for that time.

        Raises:
            TrainingRunNotFound: if the run does not exist.
            RunLeaseHeld: if another service runs it; `metadata.owner_address`.
            Unavailable: if the store does not answer, or the storage cannot be written.
        """
        entry = self._runs.entry(name)
        async with entry.changing:
            if name in self._runs.active:
                return change()
            async with self._ownership.holding(entry):
                return change()

    async def _cancel_waiting(self, entry: Entry) -> None:
        async with entry.changing, self._ownership.holding(entry):
            if not entry.run.state.final:
                self._runs.move(entry.run.name, RunState.CANCELLED)
                await self._executor.cancel_rollouts(entry)

    async def drain(self) -> None:
        """Stops the active runs at checkpoints; they stay RUNNING and resume when the service restarts."""
        self._draining = True
        for active in self._runs.active.values():
            active.control.request(StopReason.DRAIN)
        await self._runs.idle()

    def _lose(self, name: str) -> None:
        """Stops a run that another service has taken over."""
        active = self._runs.active.get(name)
        if active is not None:
            active.lost = True
            active.task.cancel()

    def _start(self, run: TrainingRun) -> ActiveRun:
        """Starts a run."""
        entry = self._runs.entry(run.name)
        control = RunControl()
        task = asyncio.create_task(self._execute(entry, control), name=run.name)
        active = ActiveRun(name=run.name, project=run.project, policy=run.policy.name, control=control, task=task)
        self._runs.begin(active)
        return active

    async def _execute(self, entry: Entry, control: RunControl) -> None:
        """Acquires a run and executes it; a stage that failed with one that was rolled back is only let wait again.

        Raises:
            NotAcquired: if another service runs it, or it is not to be run now.
            StageNotBegun: if it is a stage, and the one before it has not succeeded.
        """
        async with entry.changing:
            again = self._runs.waits_again(entry)
            if not await self._ownership.acquire(entry, for_change=again):
                raise NotAcquired
            if again and self._runs.waits_again(entry):
                await stored(entry, lambda: self._runs.wait_again(entry.run.name))
            if again or not entry.run.runnable:
                await self._ownership.release(entry)
                raise NotAcquired
        self._runs.continue_stages(entry)
        if entry.run.state is not RunState.RUNNING:
            await stored(entry, lambda: self._runs.move(entry.run.name, RunState.RUNNING))
        await self._executor.execute(entry, control)

    async def _supervise(self, active: ActiveRun) -> None:
        """Waits for the end of a run and releases its lease and its slot."""
        entry = self._runs.entry(active.name)
        try:
            await asyncio.wait({active.task})
            await self._settle(entry, active)
            await self._ownership.release(entry)
        except asyncio.CancelledError:
            active.task.cancel()
            await asyncio.wait({active.task})
            raise
        finally:
            entry.epoch = 0
            self._runs.end(active.name)

    async def _settle(self, entry: Entry, active: ActiveRun) -> None:
        """Moves a run whose task has ended to its next state, or rolls it back after a collapse."""
        error = None if active.task.cancelled() else active.task.exception()
        if active.lost or isinstance(error, RunLeaseLost):
            # Its files, rollouts and events belong to another service now.
            _log.warning("run_taken_over", run=active.name)
            return
        if not entry.epoch:
            if active.cancelled:
                await self._cancel_unowned(entry)
            return
        if isinstance(error, RewardCollapsed) and not active.cancelled:
            entry.events.notify("warning", error.message)
            sequence, step = error.sequence, error.step
            roll_back = partial(self._runs.rollback, active.name, sequence=sequence, step=step, collapsed=True)
            await stored(entry, roll_back)
            if active.control.pausing:  # the task ended before it listened
                await stored(entry, lambda: self._runs.move(active.name, RunState.PAUSED))
            return
        state, message = _next_state(active)
        if state is None:
            return
        if state.final:
            await self._executor.cancel_rollouts(entry)
        if isinstance(error, BudgetExceeded) and state is RunState.PAUSED:
            entry.events.notify("warning", f"{error.message} Then `fulmen run resume`.")
        if state is RunState.FAILED:
            entry.events.notify("error", message)
        await stored(entry, lambda: self._runs.move(active.name, state, failure_message=message))
        _log.info("run_settled", run=active.name, state=state.value)

    async def _cancel_unowned(self, entry: Entry) -> None:
        """Cancels a run that was cancelled while it was being acquired."""
        try:
            await self._cancel_waiting(entry)
        except HELD_OR_AWAY as error:
            _log.warning("run_not_cancelled", run=entry.run.name, reason=type(error).__name__)


def _next_state(active: ActiveRun) -> tuple[RunState | None, str]:
    """Returns the run's next state, None for staying as it is, and why it failed."""
    if active.cancelled:
        return RunState.CANCELLED, ""
    error = active.task.exception() if not active.task.cancelled() else asyncio.CancelledError()
    match error:
        case None:
            return RunState.SUCCEEDED, ""
        case Interrupted(reason=StopReason.PAUSE) if active.control.requested:
            return RunState.PAUSED, ""
        case Interrupted():  # by a drain, or by a pause withdrawn while the checkpoint was written
            return None, ""
        case StageNotBegun():
            return error.state, error.message
        case BudgetExceeded():  # continues from its last checkpoint once the budget is raised
            return RunState.PAUSED, ""
        case RunFailed() | FulmenError():
            return RunState.FAILED, error.message
        case _:
            # The algorithm's own mistake ends its run, not the service; the text stays in the log.
            error_id = uuid.uuid4().hex[:12]
            _log.error("run_failed_unexpectedly", run=active.name, error_id=error_id, exc_info=error)
            return RunState.FAILED, f"The run failed unexpectedly. Quote id {error_id}."
