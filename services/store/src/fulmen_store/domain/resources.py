"""Versioned resources: versions never change, aliases move.

Invariant: the numbers of a resource's versions begin at 1 and grow by one; `latest` points to the newest.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fulmen.errors import ArgumentInvalid, ResourceNotFound, Violation
from fulmen_store.domain.wakeups import Wakeups

__all__ = [
    "Alias",
    "Changes",
    "NewVersion",
    "ResourceRef",
    "ResourceTable",
    "ResourceWatcher",
    "Resources",
    "Version",
    "WatchSelection",
    "parse_ref",
]

MAX_BATCH: Final = 64
MAX_CONTENT_BYTES: Final = 16 * 1024 * 1024
MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 1024
MAX_TEXT: Final = 128
KEEP_ALIVE_S: Final = 15.0
LATEST: Final = "latest"

_ID: Final = r"[a-z0-9._-]{1,128}"
_REF: Final = re.compile(rf"resources/({_ID})(?:/versions/([1-9][0-9]{{0,17}})|/aliases/([a-z0-9._-]{{1,64}}))?")
_KIND: Final = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRef:
    """A parsed name: a resource, and either a version of it or an alias (`latest` if neither is given)."""

    resource: str
    version: int | None = None
    alias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A version to publish."""

    resource: str
    kind: str
    content_type: str
    content: bytes
    parent: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A published version."""

    resource_id: int
    resource: str
    kind: str
    version: int
    content_type: str
    content: bytes
    sha256: bytes
    size_bytes: int
    parent: str
    metadata: Mapping[str, str]
    created_at: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Where an alias points; the revision changes with every move."""

    resource_id: int
    resource: str
    alias: str
    version: int
    revision: int
    updated_at: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSelection:
    """Which resources a watcher follows."""

    project_id: int
    kinds: tuple[str, ...]
    id_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a watcher is told; empty in a keep-alive."""

    versions: Sequence[Version] = ()
    aliases: Sequence[Alias] = ()
    snapshot_complete: bool = False


class ResourceTable(Protocol):
    """Where resources live."""

    async def publish(self, project_id: int, versions: Sequence[NewVersion], *, request_id: str) -> list[Version]:
        """Adds versions in one commit; a repeat of the request id returns the first result."""
        ...

    async def set_alias(self, project_id: int, ref: ResourceRef, version: int, *, revision: int | None) -> Alias:
        """Moves an alias, if it is still at `revision`."""
        ...

    async def oldest_transaction(self) -> int:
        """Returns a lower bound of the transactions that are not visible yet."""
        ...

    async def snapshot(self, selection: WatchSelection) -> list[Version]:
        """Returns the latest version of every selected resource."""
        ...

    async def changes_since(self, selection: WatchSelection, transaction: int) -> tuple[list[Version], list[Alias]]:
        """Returns versions and aliases written by this transaction or later ones."""
        ...


class Resources:
    """Publishes versions and moves aliases."""

    def __init__(self, *, table: ResourceTable, wakeups: Wakeups) -> None:
        """Wires the use cases."""
        self._table = table
        self._wakeups = wakeups

    async def publish(self, project_id: int, versions: Sequence[NewVersion], *, request_id: str) -> list[Version]:
        """Publishes versions, all or none.

        Raises:
            ArgumentInvalid: with every problem of every version.
        """
        _check(versions, request_id)
        published = await self._table.publish(project_id, versions, request_id=request_id)
        self._wakeups.announce([("resources", project_id)])
        return published

    async def set_alias(self, project_id: int, name: str, version: int, *, etag: str) -> Alias:
        """Points an alias to a version.

        Raises:
            ArgumentInvalid: if the name is not that of an alias that can be set.
            EtagMismatch: if the alias moved since it was read.
            ResourceNotFound: if there is no such version.
        """
        ref = parse_ref(name, field="name")
        if not ref.alias or ref.alias == LATEST:
            text = "is not of the form resources/{resource}/aliases/{alias}, or names `latest`"
            raise ArgumentInvalid("The alias cannot be set.", violations=[Violation(field="name", description=text)])
        if etag and not etag.isdecimal():
            text = "is not one that this service gave out"
            raise ArgumentInvalid("The alias cannot be set.", violations=[Violation(field="etag", description=text)])
        alias = await self._table.set_alias(project_id, ref, version, revision=int(etag) if etag else None)
        self._wakeups.announce([("resources", project_id)])
        return alias


class ResourceWatcher:
    """Follows resources for watchers: a snapshot, then every change."""

    def __init__(self, *, table: ResourceTable, wakeups: Wakeups, poll_interval_s: float) -> None:
        """Wires the watcher; the poll finds what other replicas wrote."""
        self._table = table
        self._wakeups = wakeups
        self._poll_interval_s = poll_interval_s

    async def follow(
        self, selection: WatchSelection, *, stopping: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Changes]:
        """Yields the snapshot, a mark of its end, then changes, until `stopping`; something at least every 15 s."""
        floor = await self._table.oldest_transaction()
        snapshot = await self._table.snapshot(selection)
        versions = {version.resource_id: version.version for version in snapshot}
        revisions: dict[tuple[int, str], int] = {}
        for version in snapshot:
            yield Changes(versions=[version])
        yield Changes(snapshot_complete=True)
        key, quiet_s = ("resources", selection.project_id), 0.0
        while not stopping():
            seen = self._wakeups.count(key)
            next_floor = await self._table.oldest_transaction()
            # Whatever was not visible at the floor is read again: what was told already is left out by its number.
            changed, moved = await self._table.changes_since(selection, floor)
            floor = next_floor
            fresh = [version for version in changed if version.version > versions.get(version.resource_id, 0)]
            versions.update({version.resource_id: version.version for version in fresh})
            new_moves = [
                alias for alias in moved if alias.revision > revisions.get((alias.resource_id, alias.alias), 0)
            ]
            revisions.update({(alias.resource_id, alias.alias): alias.revision for alias in new_moves})
            if fresh or new_moves or quiet_s >= KEEP_ALIVE_S:
                quiet_s = 0.0
                for version in fresh:
                    yield Changes(versions=[version])
                yield Changes(aliases=new_moves)
            woken = await self._wakeups.wait(key, since=seen, limit_s=self._poll_interval_s)
            quiet_s += 0.0 if woken else self._poll_interval_s


def parse_ref(name: str, *, field: str) -> ResourceRef:
    """Takes `resources/{id}`, `.../versions/{n}` or `.../aliases/{alias}` apart.

    Raises:
        ArgumentInvalid: if the name is malformed.
    """
    match = _REF.fullmatch(name)
    if match is None:
        text = f"{name[:MAX_TEXT]!r} is not of the form resources/{{id}}[/versions/{{n}}|/aliases/{{alias}}]"
        raise ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=text)])
    version, alias = match[2], match[3]
    if version:
        return ResourceRef(resource=match[1], version=int(version))
    return ResourceRef(resource=match[1], alias=alias or "")


def not_found(name: str) -> ResourceNotFound:
    """Makes the error that names a resource, version or alias that is not there."""
    return ResourceNotFound("There is no such resource, version or alias.", resource=name)


def _check(versions: Sequence[NewVersion], request_id: str) -> None:
    violations: list[Violation] = []
    if not 1 <= len(versions) <= MAX_BATCH:
        violations.append(
            Violation(field="resources", description=f"has {len(versions)} entries, allowed are 1 to {MAX_BATCH}")
        )
    if len(request_id) > MAX_TEXT:
        violations.append(Violation(field="request_id", description="is longer than 128 characters"))
    for index, version in enumerate(versions):
        for path, text in _problems(version):
            violations.append(Violation(field=f"resources[{index}].{path}", description=text))
    if violations:
        raise ArgumentInvalid("The resources cannot be published.", violations=violations)


def _problems(version: NewVersion) -> list[tuple[str, str]]:
    problems = []
    if not re.fullmatch(_ID, version.resource):
        problems.append(("name", "is not of the form resources/{id}, an id of [a-z0-9._-]"))
    if not _KIND.fullmatch(version.kind):
        problems.append(("kind", "is not 1 to 32 characters of [a-z0-9_-]"))
    if len(version.content) > MAX_CONTENT_BYTES:
        problems.append(("content", f"has {len(version.content)} bytes, at most {MAX_CONTENT_BYTES} are allowed"))
    if len(version.content_type) > MAX_TEXT:
        problems.append(("content_type", "is longer than 128 characters"))
    if version.parent and (not (match := _REF.fullmatch(version.parent)) or not match[2]):
        problems.append(("parent", "is not of the form resources/{id}/versions/{n}"))
    too_large = any(len(k.encode()) + len(v.encode()) > MAX_METADATA_BYTES for k, v in version.metadata.items())
    if len(version.metadata) > MAX_METADATA or too_large:
        problems.append(("metadata", f"has more than {MAX_METADATA} entries, or one larger than 1 KiB"))
    return problems
