"""The replicas that live now, and how they share the backlog.

Invariant: all of this is a hint. A replica that is wrongly listed, or missing, costs time and lost claims, never safety:
who gets a rollout is decided by the compare-and-set of its row.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_store.periodic import Pace

__all__ = ["LiveReplicas", "MembershipRenewer", "Replica", "ReplicaTable", "Shares"]

MEMBERSHIP_TTL_S: Final = 10.0
RENEWAL_INTERVAL_S: Final = 3.0
BUCKETS: Final = 256

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A store process.

    Attributes:
        replica_id: minted by the process, never used again.
        address: `host:port` at which the other replicas reach it.
        runner_count: runners that are connected to it.
    """

    replica_id: UUID
    address: str
    runner_count: int = 0


class ReplicaTable(Protocol):
    """Where replicas say that they live."""

    async def renew(self, replica: Replica, *, ttl_s: float) -> list[Replica]:
        """Records or extends a replica; returns the others that live."""
        ...

    async def remove(self, replica_id: UUID) -> None:
        """Removes a replica."""
        ...


class Shares:
    """Who is preferred for which waiting rollout: rendezvous hashing (Thaler and Ravishankar, 1998) of 256 buckets.

    A replica that comes or goes moves only its own share. Replicas without runners have none, except in their own
    eyes: they look only when a runner has just come to them.
    """

    def __init__(self, own_id: UUID, others: Sequence[Replica] = ()) -> None:
        """Ranks the replicas for every bucket and keeps this replica's place in each."""
        self._places = [0] * BUCKETS
        for rival in others:
            if not rival.runner_count:
                continue
            for bucket in range(BUCKETS):
                self._places[bucket] += _score(bucket, rival.replica_id) > _score(bucket, own_id)

    def place(self, key: UUID) -> int:
        """Returns how many replicas are preferred to this one for a rollout or group: 0 if it is its own work."""
        # The last byte of a UUIDv7, and of a group's key, is as good as random.
        return self._places[key.int & (BUCKETS - 1)]


class LiveReplicas:
    """What this replica knows of the others."""

    def __init__(self, own_id: UUID) -> None:
        """Begins alone."""
        self.own_id = own_id
        self.others: tuple[Replica, ...] = ()
        self.shares = Shares(own_id)
        self.looks = 0

    def place(self, key: UUID) -> int:
        """Returns how many replicas are preferred to this one for a rollout or group: 0 if it is its own work."""
        return self.shares.place(key)

    def learn(self, others: Sequence[Replica]) -> None:
        """Takes in what the table says."""
        self.looks += 1
        if tuple(others) == self.others:
            return
        known, listed = ({one.replica_id for one in each} for each in (self.others, others))
        if known != listed:
            _log.info("replicas_changed", joined=len(listed - known), left=len(known - listed), others=len(listed))
        self.others = tuple(others)
        self.shares = Shares(self.own_id, others)


class MembershipRenewer:
    """Background role: says that this replica lives, and learns who else does."""

    def __init__(
        self,
        *,
        table: ReplicaTable,
        replicas: LiveReplicas,
        address: str,
        runner_count: Callable[[], int],
        interval_s: float = RENEWAL_INTERVAL_S,
    ) -> None:
        """Wires the role; `address` is where the others reach this replica."""
        self._table = table
        self._replicas = replicas
        self._address = address
        self._runner_count = runner_count
        self._interval_s = interval_s
        self._left = False
        # A renewal that is under way must not bring back what `leave` removes.
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Renews until it is cancelled."""
        pace = Pace(self._interval_s)
        while True:
            # Without the database the others are taken to live on: they lost the same one.
            with contextlib.suppress(DatabaseUnavailable):
                await self.renew_once()
            await pace.next()

    async def renew_once(self) -> None:
        """Renews this replica's row, unless it has left, and learns the others."""
        async with self._turn:
            if self._left:
                return
            own = Replica(replica_id=self._replicas.own_id, address=self._address, runner_count=self._runner_count())
            self._replicas.learn(await self._table.renew(own, ttl_s=MEMBERSHIP_TTL_S))

    async def leave(self) -> None:
        """Says at once that this replica is going; the others take its share at their next look."""
        async with self._turn:
            self._left = True
            try:
                await self._table.remove(self._replicas.own_id)
            except DatabaseUnavailable:
                _log.info("replica_left_silently", ttl_s=MEMBERSHIP_TTL_S)


def _score(bucket: int, replica_id: UUID) -> bytes:
    return hashlib.blake2b(bytes((bucket,)), key=replica_id.bytes, digest_size=8).digest()
