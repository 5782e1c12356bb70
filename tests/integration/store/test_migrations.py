"""Migrations: the same schema whatever the way, with the rows of the last release in it, and the last release works on it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fulmen.errors import SessionEnded
from fulmen.ids import parse_rollout_name, rollout_name, runner_name, uuid7
from fulmen.store.v1 import failure_pb2, lease_pb2, lease_service_pb2, resource_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.tokens import Role
from fulmen_store.database.database import HOT_SETTINGS
from fulmen_store.database.migrations import Migration, MigrationError, all_migrations, migrate
from tests.integration.store.test_process import StoreProcess
from tests.integration.store.test_spans import chunk_of, stored
from tests.support.last_release import old_token
from tests.support.postgres import shared_server
from tests.support.store.running import LIMIT_S, SIGNING_KEY, Runner, create, get, read_feed, running_store
from tests.support.store.schema import catalog, named_statements

# The statements of the last release as they were: they must run on the new schema.
LAST_RELEASE = Path(__file__).parent / "data" / "last_release"
# What was released is never edited: databases hold it.
RELEASED = {"0001_pre_initial.sql": "87ab820d7b67c14828e2d6a991c3d5dab72d67a2159bc76ce5ba473b28367e7c"}
APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED
REQUEST = rollout_pb2.Rollout(
    project="projects/default",
    group_size=1,
    mode=rollout_pb2.ROLLOUT_MODE_TRAIN,
    input=b"{}",
    input_content_type="application/json",
    policy={"max_attempts": 3, "attempt_timeout": {"seconds": 900}, "retry_backoff": {"seconds": 1}},
)


@pytest.fixture
def empty_url() -> Iterator[str]:
    """Yields the URL of a database without a schema."""
    server = shared_server()
    dsn = server.fresh_database(migrated=False)
    yield dsn
    server.drop(dsn)


def last_statements() -> dict[str, str]:
    """Returns the statements of the last release by name."""
    return {
        name: statement
        for path in LAST_RELEASE.glob("*.sql")
        for name, statement in named_statements(path.read_text(encoding="utf-8")).items()
    }


class LastRelease:
    """A store of the last release, as far as its statements go."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._statements = last_statements()

    async def fetch(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """Runs one of its statements."""
        return await self._connection.fetch(self._statements[name], *arguments)

    async def create(self, count: int = 1, *, group: object = None) -> list[str]:
        """Creates rollouts of project 1."""
        ids = [uuid7() for _ in range(count)]
        size = count if group is not None else 1
        row = (1, None, group, size, 0, None, 3, 24, 0, "", REQUEST.SerializeToString(deterministic=True))
        created = await self.fetch("create_rollouts", ids, *([value] * count for value in row))
        assert len(created) == count
        return [rollout_name(one) for one in ids]

    async def open_session(self) -> str:
        """Opens a session of the subject that tests have."""
        session = uuid7()
        await self.fetch("open_session", session, "tests", "old-host", b"", 600.0)
        return str(session)

    async def claim(self, session: str, names: list[str]) -> list[asyncpg.Record]:
        """Leases rollouts."""
        ids = [parse_rollout_name(name) for name in names]
        return await self.fetch("claim_rollouts", ids, [session] * len(ids))

    async def end(self, session: str, name: str, epoch: int, kind: int, rollout_state: int) -> list[asyncpg.Record]:
        """Ends an attempt."""
        row = (parse_rollout_name(name), session, epoch, False, 3 if kind else 2, kind, rollout_state, 0.0, 1, b"")
        return await self.fetch("end_attempts", *([value] for value in row))


@pytest.fixture
async def last_release(empty_url: str) -> Any:
    """Yields a store of the last release on a schema of its own."""
    await migrate(empty_url, migrations=all_migrations()[:1])
    connection = await asyncpg.connect(empty_url, server_settings=HOT_SETTINGS)
    await connection.execute("call create_day_partitions(current_date)")
    yield LastRelease(connection)
    await connection.close()


def test_what_was_released_is_not_edited() -> None:
    digests = {each.name: each.digest for each in all_migrations()}
    assert {name: digests.get(name) for name in RELEASED} == RELEASED


def test_migrations_are_numbered_without_a_gap() -> None:
    known = all_migrations()
    assert [each.number for each in known] == list(range(1, len(known) + 1))


async def test_the_schema_is_the_same_at_once_and_file_by_file(empty_url: str, last_release: LastRelease) -> None:
    """Also with rows in it, and with what `--post` takes away."""
    await last_release.create(3)
    known = all_migrations()
    for count in range(2, len(known) + 1):
        migrated = await migrate(empty_url, with_post=True, migrations=known[:count])
        assert migrated.applied == [known[count - 1].name]
    server = shared_server()
    fresh = server.fresh_database(migrated=False)
    await migrate(fresh, with_post=True)
    at_once, by_file = await catalog(fresh), await catalog(empty_url)
    assert len(at_once) > 300
    assert at_once == by_file, at_once ^ by_file
    server.drop(fresh)


async def test_a_difference_of_the_schema_would_be_noticed(database_url: str) -> None:
    before = await catalog(database_url)
    connection = await asyncpg.connect(database_url)
    for change in (
        "alter table item alter column charged set default 1",
        "alter table item drop constraint item_budget",
        "drop index item_in_order",
        "alter table project add column more int",
        "create or replace function partition_days(parent text) returns setof date language sql stable as 'select now()::date'",
    ):
        await connection.execute(change)
        after = await catalog(database_url)
        assert after != before, change
        before = after
    await connection.close()


async def test_applying_twice_changes_nothing(database_url: str) -> None:
    before = await catalog(database_url)
    migrated = await migrate(database_url)
    assert list(migrated.applied) == []
    assert await catalog(database_url) == before


async def test_replicas_that_start_at_once_migrate_once(empty_url: str) -> None:
    results = await asyncio.gather(*(migrate(empty_url) for _ in range(3)))
    names = [migration.name for migration in all_migrations() if not migration.is_post]
    assert sorted([list(result.applied) for result in results]) == [[], [], names]

    async def serve() -> None:
        async with running_store(fresh) as store:
            assert await create(await store.stubs(), 1)

    server = shared_server()
    fresh = server.fresh_database(migrated=False)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(serve(), serve())
    server.drop(fresh)


async def test_a_changed_file_is_refused_and_nothing_is_applied(empty_url: str) -> None:
    known = all_migrations()
    await migrate(empty_url, migrations=known[:2])
    changed = [known[0], replace(known[1], text=known[1].text + "\n-- A harmless remark."), *known[2:]]
    before = await catalog(empty_url)
    with pytest.raises(MigrationError, match=f"{known[1].name} was changed after it had been applied"):
        await migrate(empty_url, migrations=changed)
    assert await catalog(empty_url) == before


async def test_a_store_does_not_start_on_a_newer_schema(database_url: str, tmp_path: Path) -> None:
    known = all_migrations()
    newer = Migration(number=9000, name="9000_pre_future.sql", text="create table future (id int)")
    await migrate(database_url, migrations=[*known, newer])
    with pytest.raises(MigrationError, match="newer than this version of the store: upgrade"):
        await migrate(database_url)
    process = StoreProcess(database_url, tmp_path)
    told, _ = await asyncio.to_thread(process.process.communicate, timeout=LIMIT_S)
    assert process.process.returncode == 1
    assert "newer than this version of the store" in told
    assert "Traceback" not in told


async def test_what_the_last_release_needs_is_taken_away_only_when_told(empty_url: str) -> None:
    known = [
        Migration(number=1, name="0001_pre_first.sql", text="create table old (id int)"),
        Migration(number=2, name="0002_post_old.sql", text="drop table old"),
        Migration(number=3, name="0003_pre_third.sql", text="create table new (id int)"),
    ]
    migrated = await migrate(empty_url, migrations=known)
    assert migrated.applied == ["0001_pre_first.sql", "0003_pre_third.sql"]
    assert migrated.waiting == ["0002_post_old.sql"]
    assert (await migrate(empty_url, migrations=known)).waiting == ["0002_post_old.sql"]
    migrated = await migrate(empty_url, with_post=True, migrations=known)
    assert (migrated.applied, migrated.waiting) == (["0002_post_old.sql"], [])
    connection = await asyncpg.connect(empty_url)
    tables = "select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
    assert {row[0] for row in await connection.fetch(tables)} == {"schema_migration", "new"}
    await connection.close()


@pytest.mark.parametrize("arguments", [(), ("--post",)])
def test_the_command_migrates_and_ends(empty_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for expected in ([each.name for each in all_migrations() if arguments or not each.is_post], []):
        process = StoreProcess(empty_url, tmp_path, "migrate", *arguments)
        told, _ = process.process.communicate(timeout=LIMIT_S)
        assert process.process.returncode == 0, told
        applied = [line.removeprefix("applied ") for line in told.splitlines() if line.startswith("applied ")]
        assert applied == expected
        assert "The schema is up to date." in told


def test_the_command_says_what_post_is_for() -> None:
    command = [sys.executable, "-m", "fulmen_store", "migrate", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert "--post" in told


async def test_every_statement_of_the_last_release_can_be_prepared_on_the_new_schema(database_url: str) -> None:
    connection = await asyncpg.connect(database_url, server_settings=HOT_SETTINGS)
    statements = last_statements()
    assert len(statements) > 40
    for statement in statements.values():
        await connection.prepare(statement)
    await connection.close()


async def test_a_store_of_the_last_release_runs_beside_a_new_one(empty_url: str, last_release: LastRelease) -> None:
    await migrate(empty_url)
    async with running_store(empty_url) as store:
        stubs = await store.stubs()
        (new,) = await create(stubs, 1)
        (old,) = await last_release.create()
        session = await last_release.open_session()
        assert len(await last_release.claim(session, [new])) == 1
        assert len(await last_release.end(session, new, 1, 0, 4)) == 1
        runner = await Runner(await store.stubs(role=Role.RUNNER)).open()
        (taken,) = await runner.take(1)
        assert taken.rollout.name == old
        assert not await last_release.claim(session, [old])
        assert await runner.complete([taken]) == [APPLIED]
        groups, _ = await read_feed(stubs, groups=2)
        assert [group.rollouts[0].name for group in groups] == [new, old]


async def test_rows_of_the_last_release_live_on(empty_url: str, last_release: LastRelease) -> None:
    group = uuid7()
    (waiting,), (failing,), (done,) = [await last_release.create() for _ in range(3)]
    mates = await last_release.create(2, group=group)
    session = await last_release.open_session()
    leased = await last_release.create(2)
    assert len(await last_release.claim(session, [*leased, failing, done, mates[0]])) == 5
    await last_release.end(session, failing, 1, failure_pb2.FAILURE_KIND_INFRA, 3)
    await last_release.end(session, done, 1, 0, 4)
    await last_release.end(session, mates[0], 1, 0, 4)
    chunk = chunk_of(f"{done}/attempts/1")
    row = (parse_rollout_name(done), 1, chunk.chunk_id, 3, chunk.codec, 1000, 1002, chunk.payload, None)
    assert not await last_release.fetch("append_chunks", *([value] for value in row))
    await last_release.fetch("log_request", 1, "BatchCreateRollouts", "first", parse_rollout_name(waiting).bytes)
    await _publish(empty_url)

    await migrate(empty_url)
    async with running_store(empty_url) as store:
        stubs = await store.stubs()
        runner = await Runner(await store.stubs(role=Role.RUNNER)).open(
            session_id=session, running=[f"{name}/attempts/1" for name in leased]
        )
        assert not runner.opened.lost_attempts
        held = [lease_pb2.Assignment(attempt=f"{name}/attempts/1", lease_id=session, epoch=1) for name in leased]
        assert await runner.complete(held) == [APPLIED, APPLIED]
        taken = await runner.take(3)
        assert {(one.rollout.name, one.epoch) for one in taken} == {(waiting, 1), (failing, 2), (mates[1], 1)}
        assert await runner.complete(taken) == [APPLIED] * 3
        groups, _ = await read_feed(stubs, groups=6)
        assert [rollout.name for rollout in groups[0].rollouts] == [done]
        members = sorted(sorted(rollout.name for rollout in each.rollouts) for each in groups)
        assert members == sorted([[done], sorted(mates), [waiting], [failing], *([name] for name in leased)])
        assert [each.failure_kind for each in (await get(stubs, failing)).attempts] == [4, 0]
        (read,) = await stored(stubs, done)
        assert read.payload == chunk.payload
        again = pb.BatchCreateRolloutsRequest(rollouts=[REQUEST], request_id="first")
        assert [one.name for one in (await stubs.rollouts.BatchCreateRollouts(again)).rollouts] == [waiting]
        found = await stubs.resources.GetResources(
            resource_service_pb2.GetResourcesRequest(names=["resources/old/aliases/stable"])
        )
        assert found.resources[0].content == b"weights"


async def test_attempts_that_run_during_an_upgrade_are_not_lost(empty_url: str, last_release: LastRelease) -> None:
    """A token of the last release is bound to the default project, which its store did not look at."""
    moved, reported = [str(uuid7()) for _ in range(2)]
    for session in (moved, reported):
        await last_release.fetch("open_session", session, "old", "old-host", b"", 600.0)
    (mine,), (other,) = await last_release.create(), await last_release.create()
    await last_release.claim(moved, [mine])
    await last_release.claim(reported, [other])
    await migrate(empty_url)
    late = str(uuid7())
    await last_release.fetch("open_session", late, "old", "old-host", b"", 600.0)
    async with running_store(empty_url) as store:
        stubs = await store.stubs(token=old_token(SIGNING_KEY, "runner"))
        report = lease_pb2.AttemptResult(attempt=f"{other}/attempts/1", lease_id=reported, epoch=1)
        request = lease_service_pb2.CompleteAttemptsRequest(results=[report])
        assert [ack.status for ack in (await stubs.leases.CompleteAttempts(request)).acks] == [APPLIED]
        runner = await Runner(stubs).open(session_id=moved, running=[f"{mine}/attempts/1"])
        assert not runner.opened.lost_attempts
        held = lease_pb2.Assignment(attempt=f"{mine}/attempts/1", lease_id=moved, epoch=1)
        assert await runner.complete([held]) == [APPLIED]
        await Runner(stubs).open(session_id=late)
        # From then on the session is that of this token.
        stranger = await store.stubs(role=Role.RUNNER, project="projects/other")
        with pytest.raises(SessionEnded):
            await stranger.leases.RenewLeases(lease_service_pb2.RenewLeasesRequest(runner=runner_name(moved)))


async def _publish(dsn: str) -> None:
    """Writes a resource by the columns of the last release."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "insert into resource (project_id, name, kind, last_version) values (1, 'old', 'policy', 1);"
        "insert into resource_version (resource_id, version, content_type, content, sha256, parent, metadata)"
        " values (1, 1, 'application/octet-stream', 'weights', sha256('weights'), '', '{}');"
        "insert into resource_alias (resource_id, alias, version) values (1, 'stable', 1)"
    )
    await connection.close()
