"""Resources in PostgreSQL."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from fulmen.errors import EtagMismatch, Violation
from fulmen_service_kit.rpc.message_sizes import MESSAGE_BYTES
from fulmen_store.database.database import Database, Transaction, columns
from fulmen_store.resources.versions import (
    LATEST,
    MAX_CONTENT_BYTES,
    Alias,
    NewVersion,
    Publication,
    ResourceRef,
    Version,
    VersionKey,
    not_found,
    parse_ref,
    publish_problem,
)
from fulmen_store.resources.watch_cursor import WatchedChange, WatchSelection
from fulmen_store.run_leases.run_leases import RunFence
from fulmen_store.run_leases.table import hold_fences

__all__ = [
    "ExpiredVersion",
    "GarbageTable",
    "Lifetime",
    "ResourceTable",
    "UseKey",
]

PUBLISH = "PublishResources"
NAMES_BYTES = 6 * 1024
"""Upper bound of a version in a message without content and metadata: 34 names, a media type and numbers."""
ALIAS_BYTES = 512


class ResourceTable:
    """Reads and writes resources, versions and aliases."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def publish(self, project_id: int, publication: Publication) -> list[Version]:
        """Adds versions in one commit; a repeat of the request id returns the first result.

        Raises:
            ArgumentInvalid: If a kind differs from the resource's, or a dependency does not exist.
            EtagMismatch: If the latest version of a resource is not the expected one.
            RunLeaseLost: If the fenced training run has another epoch.
        """
        fences = [] if publication.fence is None else [(project_id, publication.fence)]
        request = (project_id, PUBLISH, publication.request_id)
        try:
            async with self._database.transaction() as transaction:
                await hold_fences(transaction, fences)
                named = {new.resource for new in publication.versions} | publication.expected.keys()
                await transaction.fetch("lock_resources", project_id, sorted(named))
                logged = await transaction.fetch_row("logged_request", *request) if publication.request_id else None
                first = None if logged is None else json.loads(logged["result"])
                if first is None:
                    await _check_expected(transaction, project_id, publication)
                    first = await _publish(transaction, project_id, publication.versions)
                    if publication.request_id:
                        row = await transaction.fetch_row("log_request", *request, json.dumps(first).encode())
                        if row is None:
                            raise _RepeatedRequest
        except _RepeatedRequest:
            # A concurrent request used the same request id for other resources.
            row = await self._database.fetch_row("logged_request", *request)
            assert row is not None, "a request id is kept for 24 hours"
            first = json.loads(row["result"])
        return [
            await self.get(
                project_id, f"resources/{resource}", ResourceRef(resource=resource, version=number), max_bytes=0
            )
            for resource, number in first
        ]

    async def get(self, project_id: int, name: str, ref: ResourceRef, *, max_bytes: int = MAX_CONTENT_BYTES) -> Version:
        """Returns one version, with its content if that has at most `max_bytes`.

        Raises:
            ResourceNotFound: If it does not exist.
        """
        if ref.version is not None:
            row = await self._database.fetch_row("version_by_number", project_id, ref.resource, ref.version, max_bytes)
        else:
            alias = ref.alias or LATEST
            row = await self._database.fetch_row("version_by_alias", project_id, ref.resource, alias, max_bytes)
        if row is None:
            raise not_found(name)
        return _version(row)

    async def content_part(self, project_id: int, name: str, ref: ResourceRef, *, offset: int, limit: int) -> bytes:
        """Returns at most `limit` bytes of a version's content, from an offset on.

        Raises:
            ResourceNotFound: If it does not exist.
        """
        part = (ref.resource, ref.version, offset, limit)
        row = await self._database.fetch_row("content_part", project_id, *part)
        if row is None:
            raise not_found(name)
        return bytes(row["content"])

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

    async def lifetimes(self, project_id: int, versions: Sequence[tuple[str, int]]) -> list[Lifetime]:
        """Returns the lifetimes of versions, by (resource, number); omits versions that were never published."""
        rows = await self._database.fetch("version_lifetimes", project_id, *columns(versions, 2))
        return [
            Lifetime(
                name=f"resources/{row['name']}/versions/{row['version']}",
                key=(row["resource_id"], row["version"]),
                removed=row["removed"],
                expiring=row["expiring"],
            )
            for row in rows
        ]

    async def set_alias(
        self,
        project_id: int,
        ref: ResourceRef,
        version: int,
        *,
        revision: int | None,
        fence: RunFence | None = None,
    ) -> Alias:
        """Moves an alias; with `revision`, only if it is still at that revision.

        Raises:
            EtagMismatch: If the alias is at another revision.
            ResourceNotFound: If the version does not exist.
            RunLeaseLost: If the fenced training run has another epoch.
        """
        async with self._database.transaction() as transaction:
            await hold_fences(transaction, [] if fence is None else [(project_id, fence)])
            await transaction.fetch("lock_resources", project_id, [ref.resource])
            found = await transaction.fetch_row("keep_versions", project_id, [ref.resource], [version])
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

    async def watch_bounds(self) -> tuple[int, int]:
        """Returns the oldest running transaction and an upper bound of all transactions so far."""
        row = await self._database.fetch_row("watch_bounds")
        assert row is not None
        return row["settled"], row["newest"]

    async def snapshot(
        self, selection: WatchSelection, *, after: int, limit: int
    ) -> tuple[list[WatchedChange], list[WatchedChange]]:
        """Returns a page of the selected resources by id: their latest versions, and all their aliases."""
        rows = await self._database.fetch("snapshot_resources", *_selected(selection), after, limit)
        latest = [
            WatchedChange(
                transaction=row["xid"],
                resource_id=row["resource_id"],
                version=row["version"],
                sent_bytes=_sent_bytes(row),
            )
            for row in rows
        ]
        aliases = await self._database.fetch("aliases_of_resources", [change.resource_id for change in latest])
        return latest, [
            WatchedChange(
                transaction=row["xid"],
                resource_id=row["resource_id"],
                version=row["version"],
                sent_bytes=ALIAS_BYTES,
                alias=_alias(row),
            )
            for row in aliases
        ]

    async def changes(
        self, selection: WatchSelection, *, after: tuple[int, int, int, str], below: int, limit: int
    ) -> list[WatchedChange]:
        """Returns changes in order, after a position and below a transaction."""
        transaction, *position = after
        rows = await self._database.fetch(
            "resource_changes", *_selected(selection), transaction, below, *position, limit
        )
        return [
            WatchedChange(
                transaction=row["xid"],
                resource_id=row["resource_id"],
                version=row["version"],
                sent_bytes=_sent_bytes(row),
                alias=_alias(row) if row["alias"] else None,
            )
            for row in rows
        ]

    async def contents(self, keys: Sequence[tuple[int, int]]) -> list[Version]:
        """Returns the existing versions among `keys`, by (resource, number), in this order; without large contents."""
        rows = await self._database.fetch("versions_by_key", *columns(keys, 2), MESSAGE_BYTES)
        return [_version(row) for row in rows]


class _RepeatedRequest(Exception):
    """Raised to roll back the additions of a repeated request."""


async def _check_expected(transaction: Transaction, project_id: int, publication: Publication) -> None:
    if not publication.expected:
        return
    rows = await transaction.fetch("latest_numbers", project_id, list(publication.expected))
    latest = {row["name"]: row["last_version"] for row in rows}
    for resource, number in publication.expected.items():
        if latest.get(resource, 0) != number:
            raise EtagMismatch(
                "The latest version is not the expected one.",
                resource=resource, expected_version=number, latest_version=latest.get(resource, 0),
            )  # fmt: skip


async def _publish(transaction: Transaction, project_id: int, versions: Sequence[NewVersion]) -> list[tuple[str, int]]:
    needed = await _dependencies(transaction, project_id, versions)
    numbers: list[tuple[str, int]] = []
    violations = []
    for index, new in enumerate(versions):
        row = await transaction.fetch_row("next_version", project_id, new.resource, new.kind)
        assert row is not None
        resource_id, number = row["id"], row["last_version"]
        numbers.append((new.resource, number))
        if row["kind"] != new.kind:
            text = f"is {new.kind}, but the resource is of kind {row['kind']}"
            violations.append(Violation(field=f"resources[{index}].kind", description=text))
            continue
        await transaction.fetch(
            "add_version", resource_id, number, new.content_type, new.content, hashlib.sha256(new.content).digest(),
            new.parent, json.dumps(dict(new.metadata)).encode(), None if new.ttl_s is None else round(new.ttl_s * 1000),
        )  # fmt: skip
        if new.dependencies:
            keys = [needed[name] for name in new.dependencies]
            await transaction.fetch("add_dependencies", resource_id, number, *columns(keys, 2))
        await transaction.fetch("move_latest", resource_id, number)
    if violations:
        raise publish_problem(violations)
    return numbers


async def _dependencies(
    transaction: Transaction, project_id: int, versions: Sequence[NewVersion]
) -> dict[str, tuple[int, int]]:
    """Locks the dependencies of versions against removal and returns them by name."""
    names = sorted({name for new in versions for name in new.dependencies})
    if not names:
        return {}
    refs = [parse_ref(name, field="dependencies") for name in names]
    rows = await transaction.fetch(
        "keep_versions", project_id, [ref.resource for ref in refs], [ref.version for ref in refs]
    )
    found = {f"resources/{row['name']}/versions/{row['version']}": (row["resource_id"], row["version"]) for row in rows}
    violations = [
        Violation(field=f"resources[{index}].dependencies[{position}]", description=f"there is no version {name}")
        for index, new in enumerate(versions)
        for position, name in enumerate(new.dependencies)
        if name not in found
    ]
    if violations:
        raise publish_problem(violations)
    return found


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
        dependencies=row["dependencies"],
        ttl_s=None if row["ttl_ms"] is None else row["ttl_ms"] / 1000,
        expires_at=row["expires_at"],
    )


def _sent_bytes(row: asyncpg.Record) -> int:
    content_bytes = row["size_bytes"] if row["size_bytes"] <= MESSAGE_BYTES else 0
    return int(content_bytes + row["metadata_bytes"] + NAMES_BYTES)


def _alias(row: asyncpg.Record) -> Alias:
    return Alias(
        resource_id=row["resource_id"],
        resource=row["name"],
        alias=row["alias"],
        version=row["version"],
        revision=row["revision"],
        updated_at=row["updated_at"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """Whether a version has been removed or can expire.

    Attributes:
        name: Full name of the version.
        removed: Whether it existed and was removed.
        expiring: Whether it has a ttl.
    """

    name: str
    key: VersionKey
    removed: bool
    expiring: bool


class GarbageTable:
    """Finds and removes expired versions and dead uses."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def expired(self, *, after: tuple[datetime.datetime, int, int], limit: int) -> list[ExpiredVersion]:
        """Returns a page of expired versions, by expiry time."""
        return [
            ExpiredVersion(
                key=(row["resource_id"], row["version"]),
                expired_at=row["expires_at"],
                referred_to=row["referred_to"],
            )
            for row in await self._database.fetch("expired_versions", *after, limit)
        ]

    async def delete_ended_uses_of(self, key: VersionKey, *, limit: int) -> tuple[int, int]:
        """Deletes uses by ended rollouts among a version's oldest uses; returns the numbers of uses read and live."""
        row = await self._database.fetch_row("delete_ended_uses_of_version", *key, limit)
        assert row is not None
        return row["seen"], row["live"]

    async def delete_ended_uses(self, *, after: UseKey, limit: int) -> tuple[UseKey, int] | None:
        """Deletes uses by ended rollouts in a page of all uses; returns the last use and the number read, or None."""
        row = await self._database.fetch_row("delete_ended_uses", *after, limit)
        return None if row is None else ((row["resource_id"], row["version"], row["rollout_id"]), row["seen"])

    async def remove(self, keys: Sequence[VersionKey]) -> list[VersionKey]:
        """Removes unused versions in one commit; returns them."""
        async with self._database.transaction() as transaction:
            # Separate statements, because the checks must see the state after the locks were taken.
            locked = await transaction.fetch("lock_versions", *columns(keys, 2))
            rows = [(row["resource_id"], row["version"]) for row in locked]
            removed = await transaction.fetch("remove_versions", *columns(rows, 2))
        return [(row["resource_id"], row["version"]) for row in removed]


UseKey = tuple[int, int, UUID]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredVersion:
    """An expired version.

    Attributes:
        referred_to: Whether an alias points to it or an existing version depends on it.
    """

    key: VersionKey
    expired_at: datetime.datetime
    referred_to: bool
