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

__all__ = ["catch_up"]

BATCH: Final = 500_000
"""Subtransactions of one transaction: their numbers are written to the log when it commits, 4 bytes each."""

_NEWEST: Final = """
select coalesce(max(newest), 0) from (
    select (
        select e.xid::text::bigint from rollout_end e where e.project_id = p.id order by e.xid desc limit 1
    ) as newest
    from project p
    union all (select v.xid::text::bigint from resource_version v order by v.xid desc limit 1)
    union all (select a.xid::text::bigint from resource_alias a order by a.xid desc limit 1)
    union all (select m.xid::text::bigint from resource_alias_move m order by m.xid desc limit 1)
) as found
"""
_NEXT: Final = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
# Every block with a handler is a subtransaction, and one that writes takes a number of its own.
_TAKE: Final = """
do $$ begin
    for i in 1..{count} loop
        begin
            insert into taken values (1);
        exception when others then raise;
        end;
    end loop;
end $$
"""


async def catch_up(connection: asyncpg.Connection, *, told: Callable[[int, int], None] | None = None) -> int:
    """Takes transaction numbers until the next one is newer than all that are stored; some 200,000 a second.

    Args:
        connection: to a database with the store's whole schema; nobody else works on it.
        told: is given how many were taken, and how many there are to take, after every batch.

    Returns:
        How many were taken: 0 unless the database was restored from a dump into a younger server.
    """
    newest, following = await connection.fetchval(_NEWEST), await connection.fetchval(_NEXT)
    missing = max(0, newest + 1 - following)
    taken = 0
    if missing:
        await connection.execute("create temporary table taken (number int) on commit delete rows")
    while taken < missing:
        count = min(BATCH, missing - taken)
        await connection.execute(_TAKE.format(count=count))
        taken += count
        if told is not None:
            told(taken, missing)
    if missing:
        await connection.execute("drop table taken")
    return taken
