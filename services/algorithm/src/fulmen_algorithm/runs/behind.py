"""Work in the background of its caller: one piece at a time, whose error is raised by the next check."""

import asyncio
from collections.abc import Coroutine


class Behind:
    """The newest piece of work of one kind."""

    def __init__(self) -> None:
        """Has nothing to do."""
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[object, object, None], *, name: str) -> None:
        """Starts work; the former must have been looked at by `done`."""
        assert self._task is None, "one piece at a time"
        self._task = asyncio.create_task(work, name=name)

    async def done(self) -> None:
        """Waits for the end of the work; raises what it raised."""
        task, self._task = self._task, None
        if task is not None:
            await task

    async def settle(self) -> None:
        """Waits for the end of the work; what it raised is left to `done`."""
        if self._task is not None:
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                # Looked at: a caller that ends for another reason never calls `done`.
                self._task.exception()

    def cancel(self) -> None:
        """Cancels the work."""
        if self._task is not None:
            self._task.cancel()
