"""Keeps the server's transaction counter ahead of the transaction numbers that the database holds.

The feeds of finished rollouts and of resources go by PostgreSQL's transaction numbers, and show what is older than the oldest
transaction that still runs. A dump that was restored into another server brings numbers that this server has not come to yet:
everything from before would be as if not committed, and feeds would stand still, for as long as the server takes to catch up.
So it is made to catch up. Order and cursors stay as they were.
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
    """Takes transaction numbers until the next one is newer than all that are stored; some 200,000 a second.

    Args:
        connection: To a database with the store's whole schema; nobody else works on it.
        told: Is given how many were taken, and how many there are to take, after every batch.

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
