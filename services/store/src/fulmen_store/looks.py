"""Looks at what many watchers see, once for all of them.

There is one look per key while it has watchers, then a pause. Watchers are woken by news alone, so that idle ones cost nothing
but their keep-alives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fulmen.errors import DatabaseUnavailable
from fulmen_store.waiting import waited

__all__ = ["Looked", "Looks", "Shared"]

KeyT = TypeVar("KeyT", bound=Hashable)
SeenT = TypeVar("SeenT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked(Generic[SeenT]):
    """What a look saw.

    Attributes:
        seen: The current state.
        is_news: Whether watchers are to know.
        has_more: Whether the next look follows without a pause.
    """

    seen: SeenT
    is_news: bool
    has_more: bool = False


@dataclass(slots=True, eq=False)
class Shared(Generic[SeenT]):
    """What the watchers of one key share.

    Attributes:
        seen: What the last look saw; None before the first.
        number: Number of looks that saw news.
        error: Why the last look failed; None if it did not.
    """

    seen: SeenT | None = None
    number: int = 0
    error: DatabaseUnavailable | None = None
    watchers: int = 0
    looker: asyncio.Task[None] | None = None
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Wakes all watchers."""
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    async def wait(self, number: int, limit_s: float) -> None:
        """Waits until there is news after `number`, a failed look, or a shutdown; for at most `limit_s` seconds.

        Raises:
            DatabaseUnavailable: If the last look failed.
        """
        if self.number == number and self.error is None:
            await waited(self._woken, max(0.0, limit_s))
        if self.error is not None:
            raise self.error


class Looks(Generic[KeyT, SeenT]):
    """The looks of all keys that have watchers at this replica."""

    def __init__(
        self,
        look: Callable[[KeyT, SeenT | None], Awaitable[Looked[SeenT]]],
        *,
        pause_s: float,
        stopping: asyncio.Event,
    ) -> None:
        """Creates it without watchers.

        Args:
            look: Looks at a key, given what the look before saw; None if there was none.
            pause_s: Pause between two looks, seconds.
            stopping: Ends the looks and wakes the watchers.
        """
        self._look = look
        self._pause_s = pause_s
        self._stopping = stopping
        self._shared: dict[KeyT, Shared[SeenT]] = {}

    def __len__(self) -> int:
        """Returns the number of keys that have watchers."""
        return len(self._shared)

    @contextmanager
    def watching(self, key: KeyT) -> Iterator[Shared[SeenT]]:
        """Yields what the watchers of a key share; the first one starts the looks, the last one ends them."""
        shared = self._shared.setdefault(key, Shared())
        shared.watchers += 1
        if shared.looker is None:
            shared.looker = asyncio.create_task(self._run(key, shared), name=f"look-{key}")
        try:
            yield shared
        finally:
            shared.watchers -= 1
            if not shared.watchers:
                del self._shared[key]
                shared.looker.cancel()

    async def _run(self, key: KeyT, shared: Shared[SeenT]) -> None:
        while not self._stopping.is_set():
            has_more = False
            try:
                looked = await self._look(key, shared.seen)
            except DatabaseUnavailable as error:
                shared.error = error
                shared.wake()
            else:
                shared.seen, shared.error, has_more = looked.seen, None, looked.has_more
                if looked.is_news:
                    shared.number += 1
                    shared.wake()
            if not has_more:
                await waited(self._stopping, self._pause_s)
        shared.wake()
