"""Stragglers: threads and tasks of agents that outlive their attempt because they cannot be stopped from outside."""

import asyncio
from collections.abc import Callable


class Stragglers:
    """The stragglers of a runner; each holds a slot.

    Attributes:
        on_change: Called when one ends.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Future[object], str] = {}
        self._afterwards: list[tuple[str, Callable[[], None]]] = []
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._running)

    def left_by(self, attempt: str) -> bool:
        """Returns True if a straggler of the attempt is running."""
        return attempt in self._running.values()

    def after(self, attempt: str, call: Callable[[], None]) -> None:
        """Calls a function when the attempt has no straggler left, or immediately if it has none."""
        if self.left_by(attempt):
            self._afterwards.append((attempt, call))
        else:
            call()

    def add(self, future: "asyncio.Future[object] | asyncio.Task[object]", attempt: str) -> None:
        """Counts a task or thread of the attempt until it is done; its exception is ignored."""
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
