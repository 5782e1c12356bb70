"""Holds the current routing table, and notifies of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fulmen.errors import Unavailable
from fulmen_llm_proxy.routing.table import RoutingTable


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
