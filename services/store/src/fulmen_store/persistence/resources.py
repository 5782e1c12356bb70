"""Resources in PostgreSQL."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import asyncpg

from fulmen.errors import ArgumentInvalid, EtagMismatch, Violation
from fulmen_store.domain.resources import (
    LATEST,
    Alias,
    NewVersion,
    ResourceRef,
    Version,
    WatchSelection,
    not_found,
)
from fulmen_store.persistence.database import Database, Transaction

__all__ = ["PgResources"]

PUBLISH = "PublishResources"


class PgResources:
    """Implements `ResourceTable`, and the reads of the transport."""

    def __init__(self, database: Database) -> None:
        """Takes the database."""
        self._database = database

    async def publish(self, project_id: int, versions: Sequence[NewVersion], *, request_id: str) -> list[Version]:
        """Adds versions in one commit; a repeat of the request id returns the first result."""
        try:
            async with self._database.transaction() as transaction:
                numbers = await _publish(transaction, project_id, versions)
                if request_id:
                    packed = json.dumps([[new.resource, number] for new, number in zip(versions, numbers, strict=True)])
                    arguments = (project_id, PUBLISH, request_id, packed.encode())
                    if await transaction.fetch_row("log_request", *arguments) is None:
                        raise _RepeatedRequest
        except _RepeatedRequest:
            row = await self._database.fetch_row("logged_request", project_id, PUBLISH, request_id)
            assert row is not None, "a request id is kept for 24 hours"
            first = json.loads(row["result"])
        else:
            first = [[new.resource, number] for new, number in zip(versions, numbers, strict=True)]
        return [
            await self.get(project_id, resource, ResourceRef(resource=resource, version=number))
            for resource, number in first
        ]

    async def get(self, project_id: int, name: str, ref: ResourceRef) -> Version:
        """Returns one version with its content.

        Raises:
            ResourceNotFound: if it is not there.
        """
        if ref.version is not None:
            row = await self._database.fetch_row("version_by_number", project_id, ref.resource, ref.version)
        else:
            row = await self._database.fetch_row("version_by_alias", project_id, ref.resource, ref.alias or LATEST)
        if row is None:
            raise not_found(name)
        return _version(row)

    async def versions_of(
        self, project_id: int, resource: str, *, kind: str | None, below: int, limit: int
    ) -> list[Version]:
        """Returns a resource's versions without content, newest first, below a number."""
        rows = await self._database.fetch("list_versions", project_id, resource, kind, below, limit)
        return [_version(row) for row in rows]

    async def latest_of_all(self, project_id: int, *, kind: str | None, below: int, limit: int) -> list[Version]:
        """Returns the latest version of resources without content, newest resource first, below a resource number."""
        rows = await self._database.fetch("list_latest", project_id, kind, below, limit)
        return [_version(row) for row in rows]

    async def aliases_of(self, project_id: int, resource: str) -> list[Alias]:
        """Returns the aliases of a resource by name."""
        return [_alias(row) for row in await self._database.fetch("list_aliases", project_id, resource)]

    async def set_alias(self, project_id: int, ref: ResourceRef, version: int, *, revision: int | None) -> Alias:
        """Moves an alias, if it is still at `revision`.

        Raises:
            EtagMismatch: if it is not.
            ResourceNotFound: if there is no such version.
        """
        async with self._database.transaction() as transaction:
            found = await transaction.fetch_row("find_version", project_id, ref.resource, version)
            if found is None:
                raise not_found(f"resources/{ref.resource}/versions/{version}")
            resource_id = found["resource_id"]
            locked = await transaction.fetch_row("lock_alias", resource_id, ref.alias)
            current = None if locked is None else locked["revision"]
            if revision is not None and revision != current:
                raise EtagMismatch("The alias has moved since it was read.", alias=ref.alias, resource=ref.resource)
            row = await transaction.fetch_row("set_alias", resource_id, ref.alias, version)
            assert row is not None
        return Alias(
            resource_id=resource_id,
            resource=ref.resource,
            alias=ref.alias,
            version=version,
            revision=row["revision"],
            updated_at=row["updated_at"],
        )

    async def oldest_transaction(self) -> int:
        """Returns a lower bound of the transactions that are not visible yet."""
        row = await self._database.fetch_row("oldest_transaction")
        assert row is not None
        return int(row[0])

    async def snapshot(self, selection: WatchSelection) -> list[Version]:
        """Returns the latest version of every selected resource."""
        return [_version(row) for row in await self._database.fetch("snapshot_versions", *_selected(selection))]

    async def changes_since(self, selection: WatchSelection, transaction: int) -> tuple[list[Version], list[Alias]]:
        """Returns versions and aliases written by this transaction or later ones."""
        versions = await self._database.fetch("changed_versions", *_selected(selection), transaction)
        aliases = await self._database.fetch("changed_aliases", *_selected(selection), transaction)
        return [_version(row) for row in versions], [_alias(row) for row in aliases]


class _RepeatedRequest(Exception):
    """Rolls back what a repeated request added."""


async def _publish(transaction: Transaction, project_id: int, versions: Sequence[NewVersion]) -> list[int]:
    numbers: dict[int, int] = {}
    # In one order for everybody: two publishers never wait for each other in a circle.
    for index in sorted(range(len(versions)), key=lambda position: (versions[position].resource, position)):
        new = versions[index]
        row = await transaction.fetch_row("next_version", project_id, new.resource, new.kind)
        assert row is not None
        if row["kind"] != new.kind:
            text = f"is {new.kind}, but the resource is of kind {row['kind']}"
            raise ArgumentInvalid(
                "The resources cannot be published.",
                violations=[Violation(field=f"resources[{index}].kind", description=text)],
            )
        numbers[index] = row["last_version"]
        await transaction.fetch(
            "add_version", row["id"], row["last_version"], new.content_type, new.content,
            hashlib.sha256(new.content).digest(), new.parent, json.dumps(dict(new.metadata)).encode(),
        )  # fmt: skip
        await transaction.fetch("move_latest", row["id"], row["last_version"])
    return [numbers[index] for index in range(len(versions))]


def _selected(selection: WatchSelection) -> tuple[int, list[str], str]:
    return selection.project_id, list(selection.kinds), selection.id_prefix


def _version(row: asyncpg.Record) -> Version:
    return Version(
        resource_id=row["resource_id"],
        resource=row["name"],
        kind=row["kind"],
        version=row["version"],
        content_type=row["content_type"],
        content=row["content"],
        sha256=row["sha256"],
        size_bytes=row["size_bytes"],
        parent=row["parent"],
        metadata=json.loads(row["metadata"]),
        created_at=row["created_at"],
    )


def _alias(row: asyncpg.Record) -> Alias:
    return Alias(
        resource_id=row["resource_id"],
        resource=row["name"],
        alias=row["alias"],
        version=row["version"],
        revision=row["revision"],
        updated_at=row["updated_at"],
    )
