"""Keeps the server's transaction counter ahead of the transaction numbers that the database holds.

The feeds of finished rollouts and of resources are ordered by PostgreSQL's transaction numbers and show rows older than
the oldest running transaction. A dump restored into another server contains numbers that this server has not reached yet:
its rows would count as not committed and feeds would stall until the server catches up. So its counter is advanced. Order
and cursors stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import asyncpg

from fulmen_store.database.queries import SQL

__all__ = ["catch_up"]

BATCH: Final = 500_000
"""Subtransactions of one transaction: their numbers are written to the log when it commits, 4 bytes each."""


async def catch_up(connection: asyncpg.Connection, *, told: Callable[[int, int], None] | None = None) -> int:
    """Consumes transaction numbers until the next one is newer than all stored ones; about 200,000 per second.

    Args:
        connection: Connection to a database with the complete schema that is not otherwise in use.
        told: Called after every batch with the numbers consumed so far, and their total.

    Returns:
        How many were taken: 0 unless the database was restored from a dump into a younger server.
    """
    newest, following = await connection.fetchval(SQL["newest_stored_xid"]), await connection.fetchval(SQL["next_xid"])
    missing = max(0, newest + 1 - following)
    taken = 0
    if missing:
        await connection.execute(SQL["make_taken"])
    while taken < missing:
        count = min(BATCH, missing - taken)
        await connection.execute(SQL["take_xids"].format(count=count))
        taken += count
        if told is not None:
            told(taken, missing)
    if missing:
        await connection.execute(SQL["drop_taken"])
    return taken
