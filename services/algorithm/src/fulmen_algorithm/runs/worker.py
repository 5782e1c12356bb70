"""Background role: executes runs concurrently and sets the next state of each."""

import asyncio
import uuid
from typing import Protocol

import structlog

from fulmen.errors import FulmenError
from fulmen_algorithm.runs.collapse import RewardCollapsed
from fulmen_algorithm.runs.control import Interrupted, RunControl, StopReason
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.registry import ActiveRun, RunRegistry
from fulmen_algorithm.runs.run import RunState, TrainingRun

_log = structlog.get_logger()

CANCEL_WAIT_S = 15.0


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


class RunWorker:
    """Executes as many runs at a time as `RunRegistry` has slots."""

    def __init__(self, runs: RunRegistry, executor: Executor) -> None:
        self._runs = runs
        self._executor = executor
        self._draining = False

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
            self._runs.move(name, RunState.CANCELLED)
            await self._executor.cancel_rollouts(entry)
        return entry.run

    async def drain(self) -> None:
        """Stops the active runs at checkpoints; they stay RUNNING and resume when the service restarts."""
        self._draining = True
        for active in self._runs.active.values():
            active.control.request(StopReason.DRAIN)
        await self._runs.idle()

    def _start(self, run: TrainingRun) -> ActiveRun:
        """Starts a run."""
        entry = self._runs.entry(run.name)
        if run.state is not RunState.RUNNING:
            run = self._runs.move(run.name, RunState.RUNNING)
        control = RunControl()
        task = asyncio.create_task(self._executor.execute(entry, control), name=run.name)
        active = ActiveRun(name=run.name, project=run.project, policy=run.policy.name, control=control, task=task)
        self._runs.begin(active)
        return active

    async def _supervise(self, active: ActiveRun) -> None:
        """Waits for the end of a run and releases its slot."""
        entry = self._runs.entry(active.name)
        try:
            await asyncio.wait({active.task})
            await self._settle(entry, active)
        except asyncio.CancelledError:
            active.task.cancel()
            await asyncio.wait({active.task})
            raise
        finally:
            self._runs.end(active.name)

    async def _settle(self, entry: Entry, active: ActiveRun) -> None:
        """Moves a run whose task has ended to its next state, or rolls it back after a collapse."""
        error = None if active.task.cancelled() else active.task.exception()
        if isinstance(error, RewardCollapsed) and not active.cancelled:
            entry.events.notify("warning", error.message)
            self._runs.rollback(active.name, sequence=error.sequence, step=error.step, collapsed=True)
            if active.control.pausing:  # the task ended before it listened
                self._runs.move(active.name, RunState.PAUSED)
            return
        state, message = _next_state(active)
        if state is None:
            return
        if state.final:
            await self._executor.cancel_rollouts(entry)
        if state is RunState.FAILED:
            entry.events.notify("error", message)
        self._runs.move(active.name, state, failure_message=message)
        _log.info("run_settled", run=active.name, state=state.value)


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
        case RunFailed() | FulmenError():
            return RunState.FAILED, error.message
        case _:
            # The algorithm's own mistake ends its run, not the service; the text stays in the log.
            error_id = uuid.uuid4().hex[:12]
            _log.error("run_failed_unexpectedly", run=active.name, error_id=error_id, exc_info=error)
            return RunState.FAILED, f"The run failed unexpectedly. Quote id {error_id}."
