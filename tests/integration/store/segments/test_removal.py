"""What is deleted or expires goes out of segments too: with the whole object, or when the rest of it is written anew."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import project_service_pb2, rollout_selection_pb2
from fulmen_store.database.database import Database
from tests.support.store.running import StoreHandle, Stubs, create_project
from tests.support.store.segments import ended_rollouts, files_in, mover_of, read_all, rows, spanned
from tests.support.store.spans import stored

DUE = "update span_segment set remove_at = now() where state = 3"


@pytest.fixture
def store_settings(tmp_path: Path) -> dict[str, Any]:
    """Returns the settings of a store with segments."""
    return {"blob_url": f"file://{tmp_path}/blobs"}


@pytest.fixture
def url(store_settings: dict[str, Any]) -> str:
    """Returns where segments go."""
    found: str = store_settings["blob_url"]
    return found


async def delete(stubs: Stubs, attempts: list[str]) -> None:
    """Deletes the rollouts of attempts."""
    names = [attempt.rpartition("/attempts/")[0] for attempt in attempts]
    answer = await stubs.rollouts.DeleteRollouts(rollout_selection_pb2.DeleteRolloutsRequest(names=names))
    assert answer.deleted_count == len(names)


async def test_a_segment_goes_with_the_last_of_its_rollouts(
    stubs: Stubs, database: Database, connection: Any, url: str, tmp_path: Path
) -> None:
    attempts = await ended_rollouts(stubs, 3)
    await spanned(stubs, attempts)
    mover = mover_of(database, url)
    await mover.run_once()
    assert len(files_in(tmp_path / "blobs")) == 1

    await delete(stubs, attempts)

    assert await rows(connection, "span_extent") == 0
    # Somebody may read it.
    await mover.run_once()
    assert len(files_in(tmp_path / "blobs")) == 1
    await connection.execute(DUE)
    await mover.run_once()
    assert files_in(tmp_path / "blobs") == []
    assert await rows(connection, "span_segment") == 0


async def test_what_half_is_deleted_of_is_written_anew_without_it(
    stubs: Stubs, database: Database, connection: Any, url: str, tmp_path: Path
) -> None:
    attempts = await ended_rollouts(stubs, 6)
    await spanned(stubs, attempts)
    mover = mover_of(database, url)
    await mover.run_once()
    (old,) = files_in(tmp_path / "blobs")
    size = old.stat().st_size
    before = await read_all(stubs, attempts[4:])

    await delete(stubs, attempts[:1])
    await mover.run_once()
    assert files_in(tmp_path / "blobs") == [old]

    await delete(stubs, attempts[1:4])
    await mover.run_once()
    assert len(files_in(tmp_path / "blobs")) == 2
    assert await read_all(stubs, attempts[4:]) == before
    await connection.execute(DUE)
    await mover.run_once()
    (new,) = files_in(tmp_path / "blobs")
    row = await connection.fetchrow("select size_bytes, live_bytes, dead_since from span_segment")
    assert (new.stat().st_size, None) == (row["size_bytes"], row["dead_since"])
    assert row["size_bytes"] == row["live_bytes"] < size
    assert await read_all(stubs, attempts[4:]) == before


async def test_what_little_is_deleted_of_is_written_anew_after_a_week(
    stubs: Stubs, database: Database, connection: Any, url: str, tmp_path: Path
) -> None:
    attempts = await ended_rollouts(stubs, 5)
    await spanned(stubs, attempts)
    mover = mover_of(database, url)
    await mover.run_once()
    old = files_in(tmp_path / "blobs")
    await delete(stubs, attempts[:1])
    await mover.run_once()
    assert files_in(tmp_path / "blobs") == old

    await connection.execute("update span_segment set dead_since = now() - interval '8 days'")
    await mover.run_once()
    await connection.execute(DUE)
    await mover.run_once()
    (new,) = files_in(tmp_path / "blobs")
    assert [new] != old
    assert await connection.fetchval("select live_bytes = size_bytes from span_segment")
    assert len(await stored(stubs, *attempts[1:])) == 8


async def test_many_small_segments_of_a_day_become_one(
    stubs: Stubs, database: Database, connection: Any, url: str, tmp_path: Path
) -> None:
    mover = mover_of(database, url)
    everything: list[str] = []
    for _ in range(8):
        attempts = await ended_rollouts(stubs, 2)
        # And late spans of a rollout that was moved before.
        await spanned(stubs, [*attempts, *everything[:1]])
        everything += attempts
        await mover.run_once()
    before = await read_all(stubs, everything)
    assert len(before.streamed) == 2 * 16 + 2 * 7
    assert await connection.fetchval("select count(*) from span_segment where state = 2") == 1
    await mover.run_once()
    assert await connection.fetchval("select count(*) from span_segment where state = 2") == 1
    assert await rows(connection, "span_extent") == 16
    await connection.execute(DUE)
    await mover.run_once()
    assert len(files_in(tmp_path / "blobs")) == 1
    assert await read_all(stubs, everything) == before


async def test_expired_rollouts_go_with_their_segments(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, url: str, tmp_path: Path
) -> None:
    kept, lost = await ended_rollouts(stubs, 2), await ended_rollouts(stubs, 4)
    await spanned(stubs, [*kept, *lost])
    mover = mover_of(database, url)
    await mover.run_once()
    # Ids of ten days ago, as if they had been made then; their segment lies under the name of today.
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
    await connection.execute("update project set retention = interval '7 days' where name = 'projects/default'")
    ids = [parse_attempt_name(attempt).rollout_id for attempt in lost]
    for table, column in (
        ("rollout", "id"),
        ("rollout_end", "rollout_id"),
        ("attempt", "rollout_id"),
        ("span_extent", "rollout_id"),
    ):
        await connection.execute(
            f"update {table} set {column} = (left(uuid7_bound($2)::text, 13) || substr({column}::text, 14))::uuid"
            f" where {column} = any ($1)",
            ids,
            old,
        )  # fmt: skip
    await connection.execute(
        "update rollout_end set ended_at = $1 where rollout_id < uuid7_bound(now() - interval '8 days')", old
    )

    await store.parts.roles["retention"].run_once()

    assert await rows(connection, "span_extent") == 2
    assert len(await stored(stubs, *kept)) == 4
    await mover.run_once()
    await connection.execute(DUE)
    await mover.run_once()
    assert len(files_in(tmp_path / "blobs")) == 1
    assert await connection.fetchval("select live_bytes = size_bytes from span_segment")


async def test_a_deleted_project_is_empty_when_its_segments_are_gone(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, url: str, tmp_path: Path
) -> None:
    for name in ("projects/gone", "projects/stays"):
        await create_project(stubs, name)
        await spanned(stubs, await ended_rollouts(stubs, 2, project=name))
    mover = mover_of(database, url)
    await mover.run_once()
    await stubs.projects.DeleteProject(project_service_pb2.DeleteProjectRequest(name="projects/gone"))
    await connection.execute(
        "update project set deleted_at = now() - interval '2 minutes' where deleted_at is not null"
    )
    remover = store.parts.roles["project-remover"]
    emptied = "select emptied_at is not null from project where name = 'projects/gone'"

    await remover.run_once()
    assert await rows(connection, "span_extent") == 2
    assert not await connection.fetchval(emptied)

    await connection.execute(DUE)
    await mover.run_once()
    await remover.run_once()
    assert await connection.fetchval(emptied)
    assert len(files_in(tmp_path / "blobs")) == 1
