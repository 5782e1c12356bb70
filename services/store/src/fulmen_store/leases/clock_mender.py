"""Background role: shortens what was written while PostgreSQL's clock was ahead, and what is remembered of delays, once it was set.

Without it, a rollout that was created meanwhile would wait, and the lease of a process that has died since would be held, for
as long as the clock had been ahead. It repeats nothing: it does not find again what it has shortened.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_store.database.database import Database
from fulmen_store.rollouts.transitions import MAX_DELAY_S
from fulmen_store.run_leases.run_leases import MAX_TTL_S
from fulmen_store.scheduling.dispatcher import Dispatcher

__all__ = ["ClockMender"]

RETRY_PAUSE_S: Final = 1.0
AGAIN_AFTER_S: Final = (2.0, 20.0)
"""Seconds until it is repeated: now() is the start of a transaction, so one that began before the clock was set back commits late."""

_log = structlog.get_logger()


class ClockMender:
    """Corrects times that are too far in the future."""

    def __init__(self, database: Database, dispatcher: Dispatcher, lease_ttl_s: float, cancel_grace_s: float) -> None:
        """Creates the role.

        Args:
            database: The database.
            dispatcher: Reads again what may run earlier than it knew.
            lease_ttl_s: Lifetime of a runner session without activity, seconds.
            cancel_grace_s: Time that a cancelled attempt has to end, seconds.
        """
        self._database = database
        self._dispatcher = dispatcher
        self._lease_ttl_s = lease_ttl_s
        self._cancel_grace_s = cancel_grace_s

    async def run(self) -> None:
        """Corrects leases immediately, since the clock may have been set while no replica ran, and whenever it was
        set."""
        was_set = self._database.clock.was_set
        while True:
            was_set.clear()
            await self._mend_surely()
            for pause_s in AGAIN_AFTER_S:
                try:
                    async with asyncio.timeout(pause_s):
                        await was_set.wait()
                except TimeoutError:
                    await self._mend_surely()
            await was_set.wait()

    async def _mend_surely(self) -> None:
        while True:
            try:
                await self.mend()
            except DatabaseUnavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return

    async def mend(self) -> int:
        """Mends everything; returns the number of rollouts that had to wait too long.

        Raises:
            DatabaseUnavailable: If not all was mended.
        """
        for name, limit_s in (
            ("mend_leases", self._cancel_grace_s),
            ("mend_sessions", self._lease_ttl_s),
            ("mend_replicas", self._lease_ttl_s),
            ("mend_run_leases", MAX_TTL_S),
        ):
            await self._database.fetch(name, limit_s)
        waiting = await self._database.fetch("mend_waiting", MAX_DELAY_S)
        if waiting:
            _log.warning("waits_shortened", rollouts=len(waiting))
        # Delays that were read while the clock was wrong are wrong, too.
        self._dispatcher.read_again({row["project_id"] for row in waiting})
        return len(waiting)
