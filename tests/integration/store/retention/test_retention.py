"""Retention: whole days go at once, the rest row by row, and nothing that is live or still wanted ever goes."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fulmen.ids import DEFAULT_PROJECT, parse_rollout_name, rollout_name, uuid7
from fulmen_store.retention.retention import ROWS_PER_BATCH
from fulmen_store.retention.table import LOCK_KEY
from tests.support.store.running import Runner, StoreHandle, Stubs, cancel, create, running_store
from tests.support.store.spans import append, chunk_of, stored

NOW = datetime.datetime.now(datetime.UTC)
DEFAULT = "projects/default"
# More rows than a batch has; the last of each table is young.
AGED_ROWS = (
    """
    insert into request_log
    select 1, 'm', 'r' || n, '', now() - (case when n < $1 then 25 else 23 end) * interval '1 hour'
    from generate_series(1, $1::int) n
    """,
    """
    insert into issued_token (id, project, role, subject, created_at, expires_at)
    select lpad(n::text, 22, '0'), 'projects/*', 1, 's', now() - interval '9 hours',
        now() - (case when n < $1 then 2 else 0 end) * interval '1 hour'
    from generate_series(1, $1::int) n
    """,
    """
    insert into runner_session (id, subject, project, host, info, lease_until, ended_at)
    select gen_random_uuid(), 's', 'projects/*', 'h', '', now(), now() - (case when n < $1 then 91 else 89 end) * interval '1 day'
    from generate_series(1, $1::int) n
    """,
    """
    insert into usage_instance
    select n, 1, now() - (case when n < $1 then 25 else 23 end) * interval '1 hour' from generate_series(1, $1::int) n
    """,
    """
    insert into usage_window
    select n, 'projects/*', 1, '', now() - (case when n < $1 then 2 else 0 end) * interval '1 hour'
    from generate_series(1, $1::int) n
    """,
    """
    insert into run_lease (project_id, name, policy, state, owner, owner_address, epoch, released, expires_at, record,
        request_id, storage, updated_at)
    select 1, 'projects/default/trainingRuns/' || n, '', 1, '', '', 0, true, now(), '', '', '',
        now() - (case when n < $1 then 8 else 6 end) * interval '1 day'
    from generate_series(1, $1::int) n
    """,
    """
    with n as (
        insert into interned_name (project_id, kind, name) select 1, 2, n from generate_series(1, $1::int) n returning id
    )
    insert into lost_runner (agent, project_id, rollouts, lost_at)
    select n.id, 1, array[gen_random_uuid()], now() - interval '25 hours' from n
    """,
)


@pytest.fixture
async def blob_store(database_url: str, tmp_path: Path) -> AsyncIterator[StoreHandle]:
    """Yields a store that puts every payload into a folder."""
    async with running_store(
        database_url, blob_url=f"file://{tmp_path}/blobs", segment_bytes=0, blob_min_bytes=1
    ) as handle:
        yield handle


async def work(store: StoreHandle) -> None:
    """Does what the role does once an hour; three times, as its own first run may be at it at the same moment."""
    for _ in range(3):
        await store.parts.roles["retention"].run_once()


async def aged(connection: Any, stubs: Stubs, *, days: int, count: int = 1, project: str = "") -> list[str]:
    """Creates rollouts that look as if they were made so many days ago, with a chunk of spans each."""
    moment = NOW - datetime.timedelta(days=days)
    new = [parse_rollout_name(name).rollout_id for name in await create(stubs, count, project=project)]
    old = [uuid7(int(moment.timestamp() * 1000)) for _ in new]
    # The store refuses ids of another time: these are given afterwards. At once with the day's table, which its own
    # first run would drop while it is empty.
    async with connection.transaction():
        await connection.fetch("select create_span_partition($1)", moment.date())
        for table in ("rollout", "item"):
            await connection.executemany(f"update {table} set id = $2 where id = $1", list(zip(new, old, strict=True)))
    names = [rollout_name(project or DEFAULT_PROJECT, each) for each in old]
    await append(stubs, *(chunk_of(f"{name}/attempts/1") for name in names))
    return names


async def ended(connection: Any, stubs: Stubs, names: list[str], *, days: int) -> list[str]:
    """Ends rollouts, so many days ago."""
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(len(names)))
    await connection.execute(
        "update rollout_end set ended_at = now() - make_interval(days => $2) where rollout_id = any ($1)",
        [parse_rollout_name(name).rollout_id for name in names],
        days,
    )
    return names


async def keep(connection: Any, days: int | None, project: str = "projects/default") -> None:
    """Sets the retention of a project; makes the project if need be."""
    await connection.execute(
        "insert into project (name, retention) values ($1, make_interval(days => $2))"
        " on conflict (name) do update set retention = excluded.retention",
        project,
        days,
    )


async def has_day(connection: Any, days: int) -> bool:
    """Returns whether a day has a table of spans."""
    name = f"span_chunk_{NOW - datetime.timedelta(days=days):%Y%m%d}"
    return bool(await connection.fetchval("select to_regclass($1) is not null", name))


def blobs_in(folder: Path) -> list[Path]:
    """Returns all blobs."""
    return [path for path in folder.rglob("*") if path.is_file()]


async def until_dropped(connection: Any, store: StoreHandle, days: int) -> None:
    """Works until a day's table is gone: the store's own role may be at it at the same moment."""
    while await has_day(connection, days):
        await work(store)


async def test_a_day_that_nobody_keeps_is_dropped_with_its_payloads(
    connection: Any, blob_store: StoreHandle, tmp_path: Path
) -> None:
    stubs = await blob_store.stubs()
    await keep(connection, 7)
    old = await ended(connection, stubs, await aged(connection, stubs, days=10, count=2), days=10)
    young = await ended(connection, stubs, await aged(connection, stubs, days=3), days=3)
    assert len(blobs_in(tmp_path / "blobs")) == 3

    await until_dropped(connection, blob_store, 10)
    assert await has_day(connection, 3)
    assert await stored(stubs, *old) == []
    assert len(await stored(stubs, *young)) == 1
    assert len(blobs_in(tmp_path / "blobs")) == 1


async def test_retention_never_drops_spans_of_running_rollouts(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 1)
    waiting, running, done = await aged(connection, stubs, days=30, count=3)
    runner = await Runner(stubs).open()
    taken = {one.rollout.name: one for one in await runner.take(3)}
    await runner.complete([taken[done]])
    await runner.complete([taken[waiting]], failure_kind=4)
    await connection.execute("update rollout_end set ended_at = now() - interval '30 days'")
    live = [row["id"] for row in await connection.fetch("select id from item")]
    assert {rollout_name(DEFAULT_PROJECT, each) for each in live} == {waiting, running}

    await work(store)

    assert await has_day(connection, 30)
    assert len(await stored(stubs, waiting, running)) == 2
    assert await stored(stubs, done) == []
    assert await runner.complete([taken[running]]) == [1]


async def test_a_rollout_is_kept_for_the_retention_after_its_end_however_old_it_is(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 7)
    names = await ended(connection, stubs, await aged(connection, stubs, days=30), days=6)

    await work(store)
    assert len(await stored(stubs, *names)) == 1

    await connection.execute("update rollout_end set ended_at = now() - interval '8 days'")
    await until_dropped(connection, store, 30)
    assert await stored(stubs, *names) == []


async def test_projects_with_a_shorter_retention_lose_their_rows_and_no_others(
    connection: Any, blob_store: StoreHandle, tmp_path: Path
) -> None:
    stubs = await blob_store.stubs()
    await keep(connection, None)
    await keep(connection, 2, "projects/short")
    kept = await ended(connection, stubs, await aged(connection, stubs, days=5), days=5)
    lost = await aged(connection, stubs, days=5, count=3, project="projects/short")
    await ended(connection, stubs, lost, days=5)

    await work(blob_store)

    assert len(await stored(stubs, *kept)) == 1
    assert await stored(stubs, *lost) == []
    for table, column in (("rollout", "id"), ("attempt", "rollout_id"), ("rollout_end", "rollout_id")):
        assert [row[0] for row in await connection.fetch(f"select {column} from {table}")] == [
            parse_rollout_name(name).rollout_id for name in kept
        ]
    assert len(blobs_in(tmp_path / "blobs")) == 1


async def test_a_group_goes_when_its_project_has_no_rollout_as_old(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 7)
    await keep(connection, None, "projects/kept")
    for project in ("", "projects/kept"):
        await create(stubs, 2, project=project, group_id="old", group_size=3)
        await create(stubs, 3, project=project, group_id="young", group_size=3)
    waits, *_ = await aged(connection, stubs, days=20)
    await connection.execute(
        "update rollout_group set touched_at = now() - interval '19 days' where created = 2",
    )
    await work(store)
    assert await groups(connection) == [(DEFAULT, 2), (DEFAULT, 3), ("projects/kept", 2), ("projects/kept", 3)]

    await cancel(stubs, waits)
    await connection.execute("update rollout_end set ended_at = now() - interval '8 days'")
    await work(store)
    assert await groups(connection) == [(DEFAULT, 3), ("projects/kept", 2), ("projects/kept", 3)]


async def groups(connection: Any) -> list[tuple[str | None, int]]:
    """Returns project and number of members of the groups that there are."""
    rows = await connection.fetch(
        "select p.name, g.created from rollout_group g left join project p on p.id = g.project_id order by 1, 2"
    )
    return [tuple(row) for row in rows]


async def test_without_a_retention_everything_stays(connection: Any, store: StoreHandle, stubs: Stubs) -> None:
    names = await ended(connection, stubs, await aged(connection, stubs, days=400), days=400)

    await work(store)

    assert len(await stored(stubs, *names)) == 1


async def test_one_replica_at_a_time_removes(connection: Any, store: StoreHandle, stubs: Stubs) -> None:
    await keep(connection, 1)
    names = await ended(connection, stubs, await aged(connection, stubs, days=9), days=9)
    other = connection.transaction()
    await other.start()
    await connection.execute("select pg_advisory_xact_lock($1)", LOCK_KEY)

    await work(store)
    assert len(await stored(stubs, *names)) == 1

    await other.rollback()
    await work(store)
    assert await stored(stubs, *names) == []


async def test_a_reader_that_holds_a_table_puts_retention_off_and_not_the_store(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 1)
    await ended(connection, stubs, await aged(connection, stubs, days=9), days=9)
    reader = connection.transaction()
    await reader.start()
    await connection.fetch("select count(*) from span_chunk")

    await work(store)
    assert await has_day(connection, 9)

    await reader.rollback()
    await until_dropped(connection, store, 9)


async def test_who_holds_the_large_values_of_a_day_alone_puts_retention_off_and_not_the_store(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 1)
    await ended(connection, stubs, await aged(connection, stubs, days=9), days=9)
    toast = await connection.fetchval(
        "select reltoastrelid::regclass::text from pg_class"
        " where relname = 'span_chunk_' || to_char(now() at time zone 'UTC' - interval '9 days', 'YYYYMMDD')"
    )
    async with connection.transaction():
        await connection.fetch(f"select count(*) from {toast}")
        await work(store)
        assert await has_day(connection, 9)

    await until_dropped(connection, store, 9)


async def test_names_go_with_the_last_rollout_that_may_have_used_them(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 7)
    (old,) = await aged(connection, stubs, days=20)
    for run in ("used", "leased", "counted", "gone"):
        await create(stubs, project=DEFAULT, training_run=f"{DEFAULT}/trainingRuns/{run}", task_type=run)
    await connection.execute(
        "update training_run set used_at = now() - interval '19 days' where name not like '%/used'",
    )
    await connection.execute("update interned_name set used_at = now() - interval '19 days' where name <> 'used'")
    await connection.execute("insert into task_duration select id, 1, 1 from interned_name")
    await connection.execute(
        "insert into run_lease (project_id, name, policy, state, owner, owner_address, epoch, released, expires_at, record,"
        " request_id, storage) values (1, $1, '', 1, '', '', 0, true, now(), '', '', '')",
        f"{DEFAULT}/trainingRuns/leased",
    )
    await connection.execute(
        "insert into usage_attempt select gen_random_uuid(), 1, 'm', 'b', 1, id, 1, 0, 1, 0, 1, 0 from training_run"
        " where name like '%/counted'"
    )
    await work(store)
    assert await names(connection) == (["counted", "gone", "leased", "used"], ["counted", "gone", "leased", "used"])

    await cancel(stubs, old)
    await connection.execute("update rollout_end set ended_at = now() - interval '8 days'")
    await work(store)
    assert await names(connection) == (["counted", "leased", "used"], ["used"])
    assert await connection.fetchval("select count(*) from task_duration") == 1


async def names(connection: Any) -> tuple[list[str], list[str]]:
    """Returns the training runs and the task types that are recorded."""
    runs = await connection.fetch("select name from training_run order by name")
    types = await connection.fetch("select name from interned_name order by name")
    return [row["name"].rpartition("/")[2] for row in runs], [row["name"] for row in types]


async def test_what_is_known_of_retries_goes_with_their_rollouts(
    connection: Any, store: StoreHandle, stubs: Stubs
) -> None:
    await keep(connection, 7)
    await keep(connection, None, "projects/kept")
    lost = await ended(connection, stubs, await aged(connection, stubs, days=10), days=10)
    kept = await ended(connection, stubs, await aged(connection, stubs, days=10, project="projects/kept"), days=10)
    await connection.executemany(
        "insert into rollout_retry (rollout_id, retried_as) values ($1, $1)",
        [(parse_rollout_name(name).rollout_id,) for name in (*lost, *kept)],
    )
    await work(store)
    left = [row["rollout_id"] for row in await connection.fetch("select rollout_id from rollout_retry")]
    assert left == [parse_rollout_name(name).rollout_id for name in kept]


async def test_what_expires_by_its_age_is_deleted_batch_by_batch(connection: Any, store: StoreHandle) -> None:
    for statement in AGED_ROWS:
        await connection.execute(statement, ROWS_PER_BATCH + 7)
    await keep(connection, 7)
    await store.parts.roles["age-retention"].run_once()
    for table in ("request_log", "issued_token", "runner_session", "usage_instance", "usage_window", "run_lease"):
        assert await connection.fetchval(f"select count(*) from {table}") == 1, table
    assert await connection.fetch("select agent from lost_runner") == []
