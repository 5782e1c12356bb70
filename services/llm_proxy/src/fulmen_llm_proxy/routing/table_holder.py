"""Holds the current routing table, and notifies of changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from fulmen.errors import Unavailable
from fulmen_llm_proxy.routing.table import RoutingTable

LOAD_S: Final = 5.0
"""Time for which an rpc to a proxy that has just started waits for the routes, seconds."""


class TableHolder:
    """Holds the current table; a swap is one assignment, so a call sees either the old or the new one."""

    def __init__(self) -> None:
        self.current = RoutingTable()
        self.is_loaded = False
        self._changed = asyncio.Event()
        self._followers: list[Callable[[RoutingTable], None]] = []

    def follow(self, follower: Callable[[RoutingTable], None]) -> None:
        """Calls a function with every new table at the moment of the swap; it must not block."""
        self._followers.append(follower)

    def swap(self, table: RoutingTable) -> None:
        """Replaces the table, calls the followers and wakes all waiters."""
        self.current = table
        self.is_loaded = True
        for follower in self._followers:
            follower(table)
        self._changed.set()
        self._changed = asyncio.Event()

    async def loaded(self) -> None:
        """Waits until the first table has been loaded, at most `LOAD_S`.

        Raises:
            Unavailable: if the store has not sent the routes in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOAD_S):
                while not self.is_loaded:
                    await self._changed.wait()
        self.require_loaded()

    def require_loaded(self) -> None:
        """Checks that the first table has been loaded.

        Raises:
            Unavailable: until this replica has received the routes from the store.
        """
        if not self.is_loaded:
            raise Unavailable("The proxy has not loaded its routes from the store yet; try again.")

    async def next_change(self) -> RoutingTable:
        """Waits for the next table and returns it. The caller sets the deadline."""
        await self._changed.wait()
        return self.current

    async def has_version(self, resource_id: str, version: int) -> None:
        """Waits until the table has this version of a resource or a later one. The caller sets the deadline."""
        while self.current.versions.get(resource_id, 0) < version:
            await self.next_change()
