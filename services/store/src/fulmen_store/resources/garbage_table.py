"""The garbage of resources in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from fulmen_store.database.database import Database, columns
from fulmen_store.resources.versions import VersionKey

__all__ = [
    "ExpiredVersion",
    "GarbageTable",
    "UseKey",
]


class GarbageTable:
    """Implements `GarbageTable`."""

    def __init__(self, database: Database) -> None:
        """Takes the database."""
        self._database = database

    async def expired(self, *, after: tuple[datetime.datetime, int, int], limit: int) -> list[ExpiredVersion]:
        """Returns a page of the versions whose ttl is over, in the order of that time."""
        return [
            ExpiredVersion(
                key=(row["resource_id"], row["version"]),
                expired_at=row["expires_at"],
                referred_to=row["referred_to"],
            )
            for row in await self._database.fetch("expired_versions", *after, limit)
        ]

    async def forget_uses_of(self, key: VersionKey, *, limit: int) -> tuple[int, int]:
        """Forgets uses by ended rollouts among a version's oldest uses; returns how many were seen, and how many live."""
        row = await self._database.fetch_row("forget_uses_of_version", *key, limit)
        assert row is not None
        return row["seen"], row["live"]

    async def forget_uses(self, *, after: UseKey, limit: int) -> tuple[UseKey, int] | None:
        """The same for a page of all uses; returns the last one and how many were seen, None at the end."""
        row = await self._database.fetch_row("forget_uses", *after, limit)
        return None if row is None else ((row["resource_id"], row["version"], row["rollout_id"]), row["seen"])

    async def remove(self, keys: Sequence[VersionKey]) -> list[VersionKey]:
        """Removes those versions that nothing uses, in one commit; returns them."""
        async with self._database.transaction() as transaction:
            # Two statements: what is checked under the locks must be seen as it is after they were taken.
            locked = await transaction.fetch("lock_versions", *columns(keys, 2))
            rows = [(row["resource_id"], row["version"]) for row in locked]
            removed = await transaction.fetch("remove_versions", *columns(rows, 2))
        return [(row["resource_id"], row["version"]) for row in removed]


UseKey = tuple[int, int, UUID]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredVersion:
    """A version whose ttl is over.

    Attributes:
        referred_to: whether an alias points to it, or a version that is still there needs it.
    """

    key: VersionKey
    expired_at: datetime.datetime
    referred_to: bool
