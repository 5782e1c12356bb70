"""Membership of replicas.

Invariant: membership is a hint. A replica that is wrongly listed or missing costs time and lost claims, never safety:
the compare-and-set of a rollout's row decides who gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_store.replicas.live_replicas import LiveReplicas, Replica
from fulmen_store.replicas.table import ReplicaTable
from fulmen_store.scheduling.runner_streams import RunnerStreams

__all__ = [
    "MembershipRenewer",
]

MEMBERSHIP_TTL_S: Final = 10.0
RENEWAL_INTERVAL_S: Final = 3.0

_log = structlog.get_logger()


class MembershipRenewer:
    """Background role: renews this replica's membership and reads the others."""

    def __init__(
        self,
        *,
        table: ReplicaTable,
        replicas: LiveReplicas,
        address: str,
        streams: RunnerStreams,
        interval_s: float = RENEWAL_INTERVAL_S,
    ) -> None:
        """Creates the role; `address` is the address of this replica for the others."""
        self._table = table
        self._replicas = replicas
        self._address = address
        self._streams = streams
        self._interval_s = interval_s
        self._left = False
        # A renewal in progress must not undo `leave`.
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Renews until cancelled."""
        while True:
            # Without the database, assume that the others still live: they have lost it too.
            with contextlib.suppress(DatabaseUnavailable):
                await self.renew_once()
            await asyncio.sleep(self._interval_s)

    async def renew_once(self) -> None:
        """Renews this replica's row, unless it has left, and reads the others."""
        async with self._turn:
            if self._left:
                return
            own = Replica(replica_id=self._replicas.own_id, address=self._address, runner_count=len(self._streams))
            self._replicas.update(await self._table.renew(own, ttl_s=MEMBERSHIP_TTL_S))

    async def leave(self) -> None:
        """Removes this replica; the others take its share at their next poll."""
        async with self._turn:
            self._left = True
            try:
                await self._table.remove(self._replicas.own_id)
            except DatabaseUnavailable:
                _log.info("replica_leave_failed", ttl_s=MEMBERSHIP_TTL_S)
