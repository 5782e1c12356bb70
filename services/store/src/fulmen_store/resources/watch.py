"""The watch of resources: a snapshot, then every new version and every move of an alias.

Changes are ordered by the transactions that wrote them. Rows are read only below the oldest running transaction, so no
row can appear before a position although transactions commit out of order. A cursor means that everything below a
transaction was sent; changes at the cursor are sent again when a watch resumes there.

Memory is bounded: names and sizes are read in pages, and contents for one message at a time, when the previous message
has been consumed.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from fulmen.errors import CursorInvalid
from fulmen_service_kit.rpc.message_sizes import MESSAGE_BYTES
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources.table import ResourceTable
from fulmen_store.resources.versions import Alias, Version
from fulmen_store.resources.watch_cursor import _LAYOUT, CURSOR_VERSION, WatchedChange, WatchSelection, decode_cursor

__all__ = [
    "Changes",
    "ResourceWatcher",
]

KEEP_ALIVE_S: Final = 15.0
PAGE_ROWS: Final = 256
# After a wake-up another transaction may briefly hide the new row: poll again soon, then back off.
FIRST_POLL_S: Final = 0.005
POLL_GROWTH: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """One message to a watcher; without versions and aliases, a keep-alive or the end of the snapshot."""

    versions: Sequence[Version] = ()
    aliases: Sequence[Alias] = ()
    snapshot_complete: bool = False
    cursor: str = ""


@dataclass(slots=True, kw_only=True)
class _Follower:
    """State of one watch; everything below transaction `floor` was sent."""

    table: ResourceTable
    selection: WatchSelection
    floor: int = 0
    # Changes that were sent in the snapshot and would be sent again after it.
    sent: set[tuple[int, int, int, str]] = field(default_factory=set)

    def cursor(self) -> str:
        packed = _LAYOUT.pack(CURSOR_VERSION, self.selection.digest(), self.floor)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    async def snapshot(self) -> AsyncIterator[Changes]:
        after = 0
        while True:
            latest, aliases = await self.table.snapshot(self.selection, after=after, limit=PAGE_ROWS)
            self.sent.update(one.position for one in (*latest, *aliases) if one.transaction >= self.floor)
            for part in _messages([*latest, *aliases]):
                yield await self._message(part)
            if len(latest) < PAGE_ROWS:
                return
            after = latest[-1].resource_id

    async def changes_since(self, *, below: int) -> AsyncIterator[Changes]:
        position = (self.floor, 0, 0, "")
        while True:
            page = await self.table.changes(self.selection, after=position, below=below, limit=PAGE_ROWS)
            parts = list(_messages([change for change in page if change.position not in self.sent]))
            for index, part in enumerate(parts):
                # The message's last transaction may have more changes, so a resumed watch repeats all of it.
                is_last = index == len(parts) - 1 and len(page) < PAGE_ROWS
                self.floor = max(self.floor, below if is_last else part[-1].transaction)
                yield await self._message(part, cursor=self.cursor())
            if len(page) < PAGE_ROWS:
                break
            position = page[-1].position
        self.floor = max(self.floor, below)
        self.sent.clear()

    async def _message(self, part: Sequence[WatchedChange], *, cursor: str = "") -> Changes:
        keys = [(change.resource_id, change.version) for change in part if change.alias is None]
        return Changes(
            versions=await self.table.contents(keys) if keys else (),
            aliases=[change.alias for change in part if change.alias is not None],
            cursor=cursor,
        )


class ResourceWatcher:
    """Follows resources for watchers."""

    def __init__(self, *, table: ResourceTable, wakeups: Wakeups, poll_interval_s: float) -> None:
        """Creates the watcher; changes of other replicas are found every `poll_interval_s` at the latest."""
        self._table = table
        self._wakeups = wakeups
        self._poll_interval_s = poll_interval_s

    async def follow(
        self, selection: WatchSelection, cursor: str = "", *, stopping: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Changes]:
        """Yields changes after a cursor, or the snapshot and then changes, until `stopping`.

        After 15 s without a change, yields a message with only a cursor.

        Raises:
            ArgumentInvalid: If the selection is malformed.
            CursorInvalid: If the cursor is from another selection or another database.
        """
        selection.check()
        floor = decode_cursor(cursor, selection) if cursor else None
        settled, newest = await self._table.watch_bounds()
        if floor is not None and floor > newest:
            raise CursorInvalid("The cursor is from another database.")
        follower = _Follower(table=self._table, selection=selection, floor=settled if floor is None else floor)
        if floor is None:
            async for message in follower.snapshot():
                yield message
            yield Changes(snapshot_complete=True, cursor=follower.cursor())
        key, quiet_s, poll_s = ("resources", selection.project_id), 0.0, self._poll_interval_s
        while not stopping():
            seen = self._wakeups.count(key)
            below, _ = await self._table.watch_bounds()
            async for message in follower.changes_since(below=below):
                yield message
                quiet_s = 0.0
            if quiet_s >= KEEP_ALIVE_S:
                yield Changes(cursor=follower.cursor())
                quiet_s = 0.0
            pause_s = min(poll_s, self._poll_interval_s)
            woken = await self._wakeups.wait(key, since=seen, limit_s=pause_s)
            poll_s = FIRST_POLL_S if woken else min(poll_s * POLL_GROWTH, self._poll_interval_s)
            quiet_s += 0.0 if woken else pause_s


def _messages(changes: Sequence[WatchedChange]) -> Iterator[list[WatchedChange]]:
    """Splits changes into the parts of messages."""
    part: list[WatchedChange] = []
    size_bytes = 0
    for change in changes:
        if part and size_bytes + change.sent_bytes > MESSAGE_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(change)
        size_bytes += change.sent_bytes
    if part:
        yield part
