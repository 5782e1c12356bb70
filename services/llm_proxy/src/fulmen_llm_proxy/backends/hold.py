"""Lets calls wait while their backend is held.

A hold is part of the backend in the routing table, so every replica keeps it; it ends when the
table says so, or by itself at its time. Calls that wait count as in flight, and are planned anew
when the hold is over: whatever changed meanwhile (another policy version, another backend) holds
for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.table import Backend
from fulmen_llm_proxy.routing.table_holder import TableHolder


class _Planned(Protocol):
    @property
    def backend(self) -> Backend: ...


T = TypeVar("T", bound=_Planned)


class BackendHold:
    """Keeps calls from backends that are held."""

    def __init__(self, *, tables: TableHolder, states: BackendStates, wall_clock: Callable[[], float]) -> None:
        """Takes the table that says who is held; `wall_clock` gives seconds since 1970."""
        self._tables = tables
        self._states = states
        self._wall_clock = wall_clock

    def in_force(self, backend: Backend) -> bool:
        """Tells whether calls for a backend have to wait now."""
        return backend.hold_until_s > 0 and backend.hold_until_s > self._wall_clock()

    async def over(self, plan: Callable[[], T]) -> T:
        """Returns the first plan whose backend is not held; waits for it as long as the holds last."""
        while True:
            planned = plan()
            left_s = planned.backend.hold_until_s - self._wall_clock()
            if left_s <= 0:
                return planned
            state = self._states.of(planned.backend.id)
            state.held += 1
            try:
                async with asyncio.timeout(left_s):
                    await self._tables.next_change()
            except TimeoutError:
                continue
            finally:
                state.held -= 1
