"""The routing table that is in force, and those who wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fulmen.errors import Unavailable
from fulmen_llm_proxy.routing.table import RoutingTable


class TableHolder:
    """Holds the current table; a swap is one assignment, so a call sees one table or the other."""

    def __init__(self) -> None:
        self.current = RoutingTable()
        self.is_loaded = False
        self._changed = asyncio.Event()
        self._followers: list[Callable[[RoutingTable], None]] = []

    def follow(self, follower: Callable[[RoutingTable], None]) -> None:
        """Lets a function see every table at the moment at which it comes in force; it must not wait."""
        self._followers.append(follower)

    def swap(self, table: RoutingTable) -> None:
        """Puts a new table in force, tells the followers and wakes all who wait."""
        self.current = table
        self.is_loaded = True
        for follower in self._followers:
            follower(table)
        self._changed.set()
        self._changed = asyncio.Event()

    def require_loaded(self) -> None:
        """Tells callers to come back while the first table is still on its way.

        Raises:
            Unavailable: until the store has told this replica its routes.
        """
        if not self.is_loaded:
            raise Unavailable("The proxy has not yet heard its routes from the store; try again.")

    async def next_change(self) -> RoutingTable:
        """Returns the next table that is put in force; the caller gives the deadline."""
        await self._changed.wait()
        return self.current

    async def has_version(self, resource_id: str, version: int) -> None:
        """Returns when the table holds that version of a resource or a later one.

        The caller gives the deadline.
        """
        while self.current.versions.get(resource_id, 0) < version:
            await self.next_change()
