"""The replicas of the store in PostgreSQL."""

from __future__ import annotations

from uuid import UUID

from fulmen_store.database.database import Database
from fulmen_store.replicas.live_replicas import Replica

__all__ = ["ReplicaTable"]


class ReplicaTable:
    """Reads and writes the membership of replicas."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def renew(self, replica: Replica, *, ttl_s: float) -> list[Replica]:
        """Records or extends a replica; returns the other live ones."""
        rows = await self._database.fetch(
            "renew_replica", replica.replica_id, replica.address, replica.runner_count, ttl_s
        )
        return [Replica(replica_id=row["id"], address=row["address"], runner_count=row["runner_count"]) for row in rows]

    async def remove(self, replica_id: UUID) -> None:
        """Removes a replica."""
        await self._database.fetch("remove_replica", replica_id)
