"""Stop requests of a run. A run honours them only where it waits: an optimiser step is never interrupted."""

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, TypeVar

Result = TypeVar("Result")


class StopReason(StrEnum):
    """Why a run stops before its end, with a checkpoint."""

    PAUSE = "pause"
    DRAIN = "drain"


class Interrupted(Exception):
    """Raised inside a run that was asked to stop; weights and progress agree wherever it is raised."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class RunControl:
    """Stop requests of one active run."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._reason = StopReason.PAUSE

    def request(self, reason: StopReason) -> None:
        """Asks the run to stop; a drain has precedence over a pause, since the process ends."""
        if not self._requested.is_set() or reason is StopReason.DRAIN:
            self._reason = reason
        self._requested.set()

    def withdraw(self) -> None:
        """Withdraws a pause; a drain stays."""
        if self._reason is StopReason.PAUSE:
            self._requested.clear()

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._requested.is_set()

    @property
    def pausing(self) -> bool:
        """Whether the run was asked to pause."""
        return self.requested and self._reason is StopReason.PAUSE

    def check(self) -> None:
        """Raises if a stop was requested.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        if self._requested.is_set():
            raise Interrupted(self._reason)

    async def unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits work and cancels it when the run is asked to stop.

        Raises:
            Interrupted: if the run was asked to stop before the work was done.
        """
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            await _ended(task)
            await _ended(stop)
        raise Interrupted(self._reason)


async def _ended(task: "asyncio.Task[Any]") -> None:
    """Cancels a task and waits for its end; its exception is ignored."""
    task.cancel()
    await asyncio.wait({task})
