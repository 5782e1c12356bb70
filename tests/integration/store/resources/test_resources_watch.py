"""Watching resources: all of them first, then every change, also from a cursor, whatever the order of commits."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid, CursorInvalid
from fulmen.store.v1 import resource_service_pb2 as pb
from fulmen_store.database.database import Database
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources import watch as resource_watch
from fulmen_store.resources.table import ResourceTable
from fulmen_store.resources.watch import ResourceWatcher
from fulmen_store.resources.watch_cursor import WatchSelection, decode_cursor
from tests.support.store.resources import publish, set_alias
from tests.support.store.running import LIMIT_S, Stubs


async def put(stubs: Stubs, name: str, content: bytes = b"x", *, kind: str = "notes", count: int = 1) -> None:
    """Publishes versions of a resource, one after the other."""
    for _ in range(count):
        await publish(stubs, name, content=content, kind=kind)


class Watch:
    """A watch and everything that it was told."""

    def __init__(self, stubs: Stubs, **request: Any) -> None:
        self.stream = stubs.resources.WatchResources(pb.WatchResourcesRequest(**request))
        self.versions: list[str] = []
        self.moves: list[tuple[str, int]] = []
        self.cursor = ""
        self.snapshots = 0

    async def read(self) -> pb.WatchResourcesResponse:
        """Reads one message."""
        async with asyncio.timeout(LIMIT_S):
            message: pb.WatchResourcesResponse = await self.stream.read()
        self.versions += [version.name.removeprefix("resources/") for version in message.resources]
        self.moves += [(alias.name.removeprefix("resources/"), alias.version) for alias in message.aliases]
        self.cursor = message.cursor or self.cursor
        self.snapshots += message.snapshot_complete
        return message

    async def snapshot(self) -> None:
        """Reads to the end of the snapshot."""
        while not (message := await self.read()).snapshot_complete:
            assert not message.cursor
        assert message.cursor

    async def until(self, *, versions: int = 0, moves: int = 0) -> None:
        """Reads until so much was told."""
        while len(self.versions) < versions or len(self.moves) < moves:
            await self.read()


async def test_the_snapshot_has_the_latest_contents_and_every_alias(stubs: Stubs) -> None:
    await put(stubs, "notes.a", count=3)
    await set_alias(stubs, "notes.a", "stable", 2)
    await put(stubs, "notes.b")
    await put(stubs, "prompt.c", kind="prompt")
    watch = Watch(stubs, kinds=["notes"], id_prefix="notes.")
    await watch.snapshot()
    assert watch.versions == ["notes.a/versions/3", "notes.b/versions/1"]
    assert watch.moves == [
        ("notes.a/aliases/latest", 3), ("notes.a/aliases/stable", 2), ("notes.b/aliases/latest", 1),
    ]  # fmt: skip


async def test_a_watch_goes_on_from_a_cursor_without_a_snapshot_and_without_a_gap(stubs: Stubs) -> None:
    await put(stubs, "notes.a")
    first = Watch(stubs)
    await first.snapshot()
    await put(stubs, "notes.a")
    await first.until(versions=2)
    first.stream.cancel()
    await put(stubs, "notes.a", count=2)
    await set_alias(stubs, "notes.a", "stable", 3)
    await set_alias(stubs, "notes.a", "stable", 1)
    second = Watch(stubs, cursor=first.cursor)
    await second.until(versions=2, moves=4)
    assert not second.snapshots
    assert [name for name in second.versions if name not in first.versions] == [
        "notes.a/versions/3", "notes.a/versions/4",
    ]  # fmt: skip
    stable = [version for name, version in second.moves if name.endswith("stable")]
    assert stable == [3, 1]


async def test_a_cursor_belongs_to_its_selection_and_database(stubs: Stubs) -> None:
    watch = Watch(stubs, kinds=["notes"])
    await watch.snapshot()
    future = resource_watch._Follower(
        table=None,
        selection=WatchSelection(project_id=1, kinds=("notes",)),
        floor=2**62,  # type: ignore[arg-type]
    ).cursor()
    for cursor in (watch.cursor[:-2], "!", "AAAA", future):
        with pytest.raises(CursorInvalid):
            await Watch(stubs, kinds=["notes"], cursor=cursor).read()
    with pytest.raises(CursorInvalid):
        await Watch(stubs, kinds=["prompt"], cursor=watch.cursor).read()
    with pytest.raises(ArgumentInvalid):
        await Watch(stubs, kinds=["notes"] * 65).read()


async def test_what_commits_late_is_told_though_others_committed_before_it(
    connection: asyncpg.Connection, stubs: Stubs
) -> None:
    await put(stubs, "notes.a")
    watch = Watch(stubs)
    await watch.snapshot()
    transaction = connection.transaction()
    await transaction.start()
    resource_id = await connection.fetchval(
        "insert into resource (project_id, name, kind, last_version) values (1, 'notes.slow', 'route', 1) returning id"
    )
    await connection.execute(
        "insert into resource_version (resource_id, version, content_type, content, sha256, parent, metadata)"
        " values ($1, 1, '', 'slow', sha256('slow'), '', '{}')",
        resource_id,
    )
    # This one has a later transaction id and commits first; a reader that moved past it would miss the slow one.
    await put(stubs, "notes.fast")
    held_back = asyncio.create_task(watch.until(versions=3))
    await put(stubs, "notes.fast")
    await transaction.commit()
    await held_back
    await watch.until(versions=4)
    assert watch.versions[1:] == ["notes.slow/versions/1", "notes.fast/versions/1", "notes.fast/versions/2"]


async def test_every_version_is_told_once_in_order_while_many_publish(stubs: Stubs) -> None:
    watch = Watch(stubs)
    await watch.snapshot()
    await asyncio.gather(*(put(stubs, f"notes.{n % 3}", count=10) for n in range(9)))
    await watch.until(versions=90, moves=90)
    for n in range(3):
        numbers = [int(name.rpartition("/")[2]) for name in watch.versions if name.startswith(f"notes.{n}/")]
        assert numbers == list(range(1, 31))


async def test_messages_are_bounded_and_a_reader_that_stops_holds_nothing_back(stubs: Stubs) -> None:
    content = bytes(400_000)
    for n in range(7):
        await put(stubs, f"dataset.{n}", content)
    watch = Watch(stubs)
    sizes = []
    while not (message := await watch.read()).snapshot_complete:
        sizes.append(sum(version.size_bytes for version in message.resources))
    assert max(sizes) <= resource_watch.MESSAGE_BYTES
    assert sum(sizes) == 7 * len(content)
    for n in range(7):
        await put(stubs, f"dataset.{n}", content)
    while len(watch.versions) < 14:
        message = await watch.read()
        assert sum(version.size_bytes for version in message.resources) <= resource_watch.MESSAGE_BYTES
        assert message.cursor


async def test_the_next_contents_are_read_only_when_the_last_message_was_taken(
    database: Database, stubs: Stubs
) -> None:
    for n in range(4):
        await put(stubs, f"dataset.{n}", bytes(600_000))
    reads: list[int] = []

    class Counted(ResourceTable):
        async def contents(self, keys: Any) -> Any:
            reads.append(len(keys))
            return await super().contents(keys)

    watcher = ResourceWatcher(table=Counted(database), wakeups=Wakeups(), poll_interval_s=0.05)
    messages = watcher.follow(WatchSelection(project_id=1))
    for taken in range(1, 5):
        await anext(messages)
        assert reads == [1] * taken
    await messages.aclose()  # type: ignore[attr-defined]  # it is an asynchronous generator


async def test_a_quiet_watch_is_kept_alive_with_a_cursor_that_moves_on(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_watch, "KEEP_ALIVE_S", 0.1)
    watch = Watch(stubs, kinds=["none"])
    await watch.snapshot()
    before = watch.cursor
    await put(stubs, "notes.a", count=3)
    message = await watch.read()
    while message.cursor == before:
        message = await watch.read()
    assert not message.resources
    assert not message.aliases
    selection = WatchSelection(project_id=1, kinds=("none",))
    assert decode_cursor(message.cursor, selection) > decode_cursor(before, selection)
