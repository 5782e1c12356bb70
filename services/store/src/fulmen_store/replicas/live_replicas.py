"""x"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog

__all__ = [
    "LiveReplicas",
    "Replica",
    "Shares",
]

_log = structlog.get_logger()

BUCKETS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A store process.

    Attributes:
        replica_id: Minted by the process, never used again.
        address: `host:port` at which the other replicas reach it.
        runner_count: Runners that are connected to it.
    """

    replica_id: UUID
    address: str
    runner_count: int = 0


class Shares:
    """The preferred replica of every waiting rollout: rendezvous hashing (Thaler and Ravishankar, 1998) of 256 buckets.

    A replica that joins or leaves moves only its own share. Replicas without runners have none, except in their own view,
    which they use only once a runner has connected.
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
    """The other replicas, as of the last poll."""

    def __init__(self, own_id: UUID) -> None:
        self.own_id = own_id
        self.others: tuple[Replica, ...] = ()
        self.shares = Shares(own_id)
        self.polls = 0

    def place(self, key: UUID) -> int:
        """Returns how many replicas are preferred to this one for a rollout or group: 0 if it is its own work."""
        return self.shares.place(key)

    def update(self, others: Sequence[Replica]) -> None:
        """Replaces the known replicas."""
        self.polls += 1
        if tuple(others) == self.others:
            return
        known, listed = ({one.replica_id for one in each} for each in (self.others, others))
        if known != listed:
            _log.info("replicas_changed", joined=len(listed - known), left=len(known - listed), others=len(listed))
        self.others = tuple(others)
        self.shares = Shares(self.own_id, others)


def _score(bucket: int, replica_id: UUID) -> bytes:
    return hashlib.blake2b(bytes((bucket,)), key=replica_id.bytes, digest_size=8).digest()
