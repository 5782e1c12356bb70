"""Wake-ups inside one replica: waiters of a key wake immediately, without a database round trip.

A wake-up is a hint and may be missed (notifications from other replicas can be lost), so every waiter also polls
periodically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable
from typing import Final

from fulmen_store.events import Event

__all__ = ["PROJECTS_CHANGED", "Wakeups"]

PROJECTS_CHANGED: Final = ("projects",)


class Wakeups:
    """Wakes waiters by key."""

    def __init__(self) -> None:
        self.announced: Event[list[Hashable]] = Event()
        self._counts: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}

    def count(self, key: Hashable) -> int:
        """Returns the number of announcements of a key since the first call; read it before polling, then wait."""
        return self._counts.setdefault(key, 0)

    def announce(self, keys: Iterable[Hashable]) -> None:
        """Wakes the waiters of keys for an event at this replica, and announces it to the others."""
        happened = list(keys)
        self.wake(happened)
        self.announced.emit(happened)

    def wake(self, keys: Iterable[Hashable]) -> None:
        """Wakes the waiters of keys; ignores keys that never had a waiter."""
        for key in keys:
            if key not in self._counts:
                continue
            self._counts[key] += 1
            for event in self._waiting.get(key, ()):
                event.set()

    def announce_all(self) -> None:
        """Wakes all waiters so that they check for a shutdown."""
        self.wake(list(self._waiting))

    async def wait(self, key: Hashable, *, since: int, limit_s: float) -> bool:
        """Waits until a key is announced after `since`; returns False on timeout."""
        if self.count(key) != since:
            return True
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(event)
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(key, None)
        return True
