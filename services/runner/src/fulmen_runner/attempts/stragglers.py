"""What agents left running after their attempt ended: threads and tasks that cannot be stopped from outside."""

import asyncio
from collections.abc import Callable


class Stragglers:
    """Counts what still runs, so that its slots are not given away.

    `on_change` is called whenever one ends.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Future[object], str] = {}
        self._afterwards: list[tuple[str, Callable[[], None]]] = []
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._running)

    def left_by(self, attempt: str) -> bool:
        """Returns whether anything of an attempt still runs."""
        return attempt in self._running.values()

    def after(self, attempt: str, call: Callable[[], None]) -> None:
        """Calls something once nothing of an attempt runs any more, perhaps at once."""
        if self.left_by(attempt):
            self._afterwards.append((attempt, call))
        else:
            call()

    def add(self, future: "asyncio.Future[object] | asyncio.Task[object]", attempt: str) -> None:
        """Counts something of an attempt until it is done; what it raises then is of no interest to anybody."""
        if future.done():
            return
        self._running[future] = attempt
        future.add_done_callback(self._ended)

    def _ended(self, future: "asyncio.Future[object]") -> None:
        del self._running[future]
        if not future.cancelled():
            future.exception()
        waiting, self._afterwards = self._afterwards, []
        for attempt, call in waiting:
            self.after(attempt, call)
        self.on_change()
