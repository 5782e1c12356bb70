"""The watch of resources: a snapshot, then every new version and every move of an alias.

The order is that of the transactions that wrote them. Rows are read only below the oldest transaction that still runs,
so none can appear behind a place that was told although transactions commit out of order. A cursor says that
everything below a transaction was told; what lies at it is told again when a watch goes on from there.

Only a bounded part is in memory: names and sizes are read by the page, contents for one message at a time, and the
next only when the last message was taken.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fulmen.errors import CursorInvalid, Violation
from fulmen_store.malformed import malformed_request
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources.resources import Alias, Version

__all__ = ["Changes", "ResourceWatcher", "WatchSelection", "WatchTable", "WatchedChange", "decode_cursor"]

KEEP_ALIVE_S: Final = 15.0
PAGE_ROWS: Final = 256
MESSAGE_BYTES: Final = 1024 * 1024
MAX_KINDS: Final = 64
MAX_PREFIX: Final = 128
CURSOR_VERSION: Final = 1
_LAYOUT: Final = struct.Struct(">B8sQ")
# After a wake-up the new row may be hidden for an instant by another transaction: look again soon, then ever less.
FIRST_LOOK_S: Final = 0.005
LOOK_GROWTH: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSelection:
    """Which resources a watcher follows; no kinds mean all."""

    project_id: int
    kinds: tuple[str, ...] = ()
    id_prefix: str = ""

    def check(self) -> None:
        """Checks its size.

        Raises:
            ArgumentInvalid: if it names too much.
        """
        problems = []
        if len(self.kinds) > MAX_KINDS:
            problems.append(Violation(field="kinds", description=f"has more than {MAX_KINDS} entries"))
        if len(self.id_prefix) > MAX_PREFIX:
            problems.append(Violation(field="id_prefix", description=f"is longer than {MAX_PREFIX} characters"))
        if problems:
            raise malformed_request(problems)

    def digest(self) -> bytes:
        """Returns 8 bytes that tell selections apart."""
        text = "\0".join([str(self.project_id), self.id_prefix, *sorted(set(self.kinds))])
        return hashlib.sha256(text.encode()).digest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedChange:
    """A new version, or a move of an alias: then `alias` holds it.

    Attributes:
        transaction: the id of the transaction that wrote it.
        size_bytes: the size of the version's content, 0 for a move.
    """

    transaction: int
    resource_id: int
    version: int
    size_bytes: int = 0
    alias: Alias | None = None

    @property
    def place(self) -> tuple[int, int, int, str]:
        """Where it is in the order of all changes."""
        return self.transaction, self.resource_id, self.version, self.alias.alias if self.alias else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """One message to a watcher; without versions and aliases it is a keep-alive, or the end of the snapshot."""

    versions: Sequence[Version] = ()
    aliases: Sequence[Alias] = ()
    snapshot_complete: bool = False
    cursor: str = ""


class WatchTable(Protocol):
    """Where changes of resources are read."""

    async def watch_bounds(self) -> tuple[int, int]:
        """Returns the oldest transaction that still runs and an upper bound of all transactions so far."""
        ...

    async def snapshot(
        self, selection: WatchSelection, *, after: int, limit: int
    ) -> tuple[list[WatchedChange], list[WatchedChange]]:
        """Returns a page of the selected resources by id: their latest versions, and all their aliases."""
        ...

    async def changes(
        self, selection: WatchSelection, *, after: tuple[int, int, int, str], below: int, limit: int
    ) -> list[WatchedChange]:
        """Returns changes in order, after a place and below a transaction."""
        ...

    async def contents(self, keys: Sequence[tuple[int, int]]) -> list[Version]:
        """Returns those versions, by (resource, number), that are still there, in this order."""
        ...


@dataclass(slots=True, kw_only=True)
class _Follower:
    """One watch: the place up to which everything was told."""

    table: WatchTable
    selection: WatchSelection
    floor: int = 0
    # What the snapshot told of transactions that the changes will bring again.
    told: set[tuple[int, int, int, str]] = field(default_factory=set)

    def cursor(self) -> str:
        packed = _LAYOUT.pack(CURSOR_VERSION, self.selection.digest(), self.floor)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    async def snapshot(self) -> AsyncIterator[Changes]:
        after = 0
        while True:
            latest, aliases = await self.table.snapshot(self.selection, after=after, limit=PAGE_ROWS)
            self.told.update(one.place for one in (*latest, *aliases) if one.transaction >= self.floor)
            for part in _messages([*latest, *aliases]):
                yield await self._message(part)
            if len(latest) < PAGE_ROWS:
                return
            after = latest[-1].resource_id

    async def news(self, *, below: int) -> AsyncIterator[Changes]:
        place = (self.floor, 0, 0, "")
        while True:
            page = await self.table.changes(self.selection, after=place, below=below, limit=PAGE_ROWS)
            parts = list(_messages([change for change in page if change.place not in self.told]))
            for index, part in enumerate(parts):
                # Of the message's last transaction there may be more to tell: whoever goes on begins with all of it.
                is_last = index == len(parts) - 1 and len(page) < PAGE_ROWS
                self.floor = max(self.floor, below if is_last else part[-1].transaction)
                yield await self._message(part, cursor=self.cursor())
            if len(page) < PAGE_ROWS:
                break
            place = page[-1].place
        self.floor = max(self.floor, below)
        self.told.clear()

    async def _message(self, part: Sequence[WatchedChange], *, cursor: str = "") -> Changes:
        keys = [(change.resource_id, change.version) for change in part if change.alias is None]
        return Changes(
            versions=await self.table.contents(keys) if keys else (),
            aliases=[change.alias for change in part if change.alias is not None],
            cursor=cursor,
        )


class ResourceWatcher:
    """Follows resources for watchers."""

    def __init__(self, *, table: WatchTable, wakeups: Wakeups, poll_interval_s: float) -> None:
        """Wires the watcher; the poll finds what other replicas wrote."""
        self._table = table
        self._wakeups = wakeups
        self._poll_interval_s = poll_interval_s

    async def follow(
        self, selection: WatchSelection, cursor: str = "", *, stopping: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Changes]:
        """Yields changes from a cursor on, without one the snapshot first, until `stopping`.

        A message with only a cursor comes when there was nothing to tell for 15 s.

        Raises:
            ArgumentInvalid: if the selection is malformed.
            CursorInvalid: if the cursor is of another selection, or of another database's future.
        """
        selection.check()
        floor = decode_cursor(cursor, selection) if cursor else None
        settled, newest = await self._table.watch_bounds()
        if floor is not None and floor > newest:
            raise CursorInvalid("The cursor is not of this database.")
        follower = _Follower(table=self._table, selection=selection, floor=settled if floor is None else floor)
        if floor is None:
            async for message in follower.snapshot():
                yield message
            yield Changes(snapshot_complete=True, cursor=follower.cursor())
        key, quiet_s, look_s = ("resources", selection.project_id), 0.0, self._poll_interval_s
        while not stopping():
            seen = self._wakeups.count(key)
            below, _ = await self._table.watch_bounds()
            async for message in follower.news(below=below):
                yield message
                quiet_s = 0.0
            if quiet_s >= KEEP_ALIVE_S:
                yield Changes(cursor=follower.cursor())
                quiet_s = 0.0
            pause_s = min(look_s, self._poll_interval_s)
            woken = await self._wakeups.wait(key, since=seen, limit_s=pause_s)
            look_s = FIRST_LOOK_S if woken else min(look_s * LOOK_GROWTH, self._poll_interval_s)
            quiet_s += 0.0 if woken else pause_s


def decode_cursor(text: str, selection: WatchSelection) -> int:
    """Returns the transaction below which everything was told.

    Raises:
        CursorInvalid: if the cursor is malformed or of another selection.
    """
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        version, digest, transaction = _LAYOUT.unpack(packed)
    except (binascii.Error, ValueError, struct.error):
        raise CursorInvalid("The cursor is malformed.") from None
    if version != CURSOR_VERSION or digest != selection.digest():
        raise CursorInvalid("The cursor belongs to another selection.")
    return int(transaction)


def _messages(changes: Sequence[WatchedChange]) -> Iterator[list[WatchedChange]]:
    """Cuts changes into parts whose contents have about 1 MiB, unless one alone is larger."""
    part: list[WatchedChange] = []
    size_bytes = 0
    for change in changes:
        if part and size_bytes + change.size_bytes > MESSAGE_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(change)
        size_bytes += change.size_bytes
    if part:
        yield part
