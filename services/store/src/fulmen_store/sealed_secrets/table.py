"""Secrets in PostgreSQL, sealed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import asyncpg

from fulmen_store.database.database import Database

__all__ = ["SealedSecret", "SecretTable", "SecretView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretView:
    """A secret without its value; `hosts` is empty for a variable of agents."""

    name: str
    hosts: tuple[str, ...]
    created_at: datetime.datetime
    updated_at: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """A secret with its sealed value."""

    project_id: int
    project: str
    name: str
    hosts: tuple[str, ...]
    sealed: bytes = field(repr=False)


class SecretTable:
    """Reads and writes secrets."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def set(self, secret: SealedSecret, *, key_id: bytes, max_count: int) -> SecretView | None:
        """Adds or replaces a secret; returns None if the project has `max_count` others."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_secrets", secret.project_id)
            row = await transaction.fetch_row(
                "set_secret", secret.project_id, secret.name, list(secret.hosts), key_id, secret.sealed, max_count
            )
        return None if row is None else _view(row)

    async def list_all(self, project_id: int) -> list[SecretView]:
        """Returns the secrets of a project by name."""
        return [_view(row) for row in await self._database.fetch("list_secrets", project_id)]

    async def delete(self, project_id: int, name: str) -> bool:
        """Deletes a secret; returns False if it does not exist."""
        return bool(await self._database.fetch("delete_secret", project_id, name))

    async def sealed(self, project_id: int, project: str, names: Sequence[str]) -> list[SealedSecret]:
        """Returns secrets by name, without those that do not exist."""
        rows = await self._database.fetch("sealed_secrets", project_id, list(names))
        return [_sealed(row, project_id, project) for row in rows]

    async def backend_keys(self, project_id: int, project: str) -> list[SealedSecret]:
        """Returns the keys of backends by name."""
        rows = await self._database.fetch("sealed_backend_keys", project_id)
        return [_sealed(row, project_id, project) for row in rows]

    async def of_keys(self, key_ids: Sequence[bytes], *, limit: int) -> list[SealedSecret]:
        """Returns secrets of all projects that are sealed with one of these keys."""
        rows = await self._database.fetch("secrets_of_keys", list(key_ids), limit)
        return [_sealed(row, row["project_id"], row["project"]) for row in rows]

    async def reseal(self, old: SealedSecret, *, key_id: bytes, sealed: bytes) -> None:
        """Replaces the sealed value, unless the secret was set meanwhile."""
        await self._database.fetch("reseal_secret", old.project_id, old.name, old.sealed, key_id, sealed)

    async def leased_request(self, project_id: int, rollout_id: UUID, session_id: UUID, epoch: int) -> bytes | None:
        """Returns the serialized request of a rollout; None if this lease on it is not held."""
        row = await self._database.fetch_row("leased_request", rollout_id, project_id, session_id, epoch)
        return None if row is None else bytes(row["request"])


def _view(row: asyncpg.Record) -> SecretView:
    return SecretView(
        name=row["name"], hosts=tuple(row["hosts"]), created_at=row["created_at"], updated_at=row["updated_at"]
    )


def _sealed(row: asyncpg.Record, project_id: int, project: str) -> SealedSecret:
    return SealedSecret(
        project_id=project_id, project=project, name=row["name"], hosts=tuple(row["hosts"]), sealed=row["sealed"]
    )
