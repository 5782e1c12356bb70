"""Ended rollouts are deleted for good, with all that belongs to them, and what is still needed is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid, PageTokenInvalid, RolloutNotFound, RolloutStateInvalid
from fulmen.ids import parse_rollout_name
from fulmen.store.v1 import failure_pb2, rollout_pb2, run_lease_service_pb2, usage_service_pb2
from fulmen.store.v1 import rollout_selection_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2 as rollouts_pb
from fulmen_store.rollouts import deletion
from tests.support.store.running import (
    Runner,
    StoreHandle,
    Stubs,
    cancel,
    create,
    get,
    read_feed,
    running_store,
)
from tests.support.store.spans import append, chunk_of, stored

RUN = "projects/default/trainingRuns/a"
TABLES = ("rollout", "attempt", "rollout_end", "span_chunk")


@pytest.fixture
async def blob_store(database_url: str, tmp_path: Path) -> AsyncIterator[StoreHandle]:
    """Yields a store that puts every payload into a folder."""
    async with running_store(
        database_url, blob_url=f"file://{tmp_path}/blobs", segment_bytes=0, blob_min_bytes=1
    ) as handle:
        yield handle


async def delete(stubs: Stubs, *names: str, **fields: Any) -> pb.DeleteRolloutsResponse:
    """Makes one call."""
    request = pb.DeleteRolloutsRequest(names=names, **fields)
    answer: pb.DeleteRolloutsResponse = await stubs.rollouts.DeleteRollouts(request)
    return answer


async def delete_all(stubs: Stubs, **fields: Any) -> tuple[int, int, int]:
    """Makes calls until all were looked at; returns the numbers of deleted and kept rollouts, and of calls."""
    deleted = kept = calls = 0
    token = ""
    while token or not calls:
        answer = await delete(stubs, page_token=token, **fields)
        deleted, kept, calls = deleted + answer.deleted_count, kept + answer.kept_count, calls + 1
        token = answer.next_page_token
    return deleted, kept, calls


async def ended(stubs: Stubs, count: int = 1, **fields: Any) -> list[str]:
    """Runs rollouts, each with a chunk of spans."""
    names = await create(stubs, count, **fields)
    runner = await Runner(stubs).open()
    taken = await runner.take(count)
    await append(stubs, *(chunk_of(each.attempt) for each in taken))
    await runner.complete(taken)
    return names


async def listed(stubs: Stubs, **fields: Any) -> set[str]:
    """Returns the names of all rollouts of a list."""
    page = await stubs.rollouts.ListRollouts(rollouts_pb.ListRolloutsRequest(page_size=1000, **fields))
    return {each.name for each in page.rollouts}


async def rows_of(connection: asyncpg.Connection, *names: str) -> dict[str, int]:
    """Counts the rows of rollouts in every table."""
    ids = [parse_rollout_name(name).rollout_id for name in names]
    return {
        table: await connection.fetchval(
            f"select count(*) from {table} where {'id' if table == 'rollout' else 'rollout_id'} = any ($1)",
            ids,
        )
        for table in TABLES
    }


async def test_a_deleted_rollout_is_gone_with_its_attempts_spans_and_payloads(
    blob_store: StoreHandle, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    stubs = await blob_store.stubs()
    gone, stays = (await ended(stubs))[0], (await ended(stubs))[0]
    assert len(list(tmp_path.rglob("*/*"))) > 0
    assert (await delete(stubs, gone)).deleted_count == 1
    assert set((await rows_of(connection, gone)).values()) == {0}
    assert set((await rows_of(connection, stays)).values()) == {1}
    with pytest.raises(RolloutNotFound):
        await get(stubs, gone)
    with pytest.raises(RolloutNotFound):
        await delete(stubs, gone)
    assert len(await stored(stubs, stays)) == 1
    files = [str(path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1
    assert stays.rpartition("/")[2] in files[0]


async def test_the_usage_of_deleted_rollouts_is_kept(stubs: Stubs) -> None:
    (name,) = await ended(stubs)
    usage = usage_service_pb2.Usage(request_count=3)
    delta = usage_service_pb2.UsageDelta(
        project="projects/default", attempt=f"{name}/attempts/1", model="m", usage=usage
    )
    await stubs.usage.SyncUsage(usage_service_pb2.SyncUsageRequest(instance_id="p", sequence=1, usage=[delta]))
    await delete(stubs, name)
    total = await stubs.usage.GetUsage(usage_service_pb2.GetUsageRequest())
    assert [each.usage.request_count for each in total.groups] == [3]


async def test_a_dead_rollout_that_was_retried_is_deleted_without_a_trace_and_its_copy_stays(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(1), failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
    (copy,) = (await stubs.rollouts.RetryRollouts(rollouts_pb.RetryRolloutsRequest(filter="*"))).rollouts
    assert await delete_all(stubs, filter="*") == (1, 0, 1)
    assert await listed(stubs) == {copy.name}
    assert await connection.fetchval("select count(*) from rollout_retry") == 0
    assert (await get(stubs, copy.name)).metadata["fulmen.retry_of"] == name


async def test_named_rollouts_are_deleted_all_or_none(stubs: Stubs) -> None:
    done = await ended(stubs, 2)
    (waiting,) = await create(stubs)
    with pytest.raises(RolloutStateInvalid) as refused:
        await delete(stubs, *done, waiting)
    assert refused.value.metadata == {"rollout": waiting, "state": "QUEUED"}
    assert await listed(stubs) == {*done, waiting}
    await cancel(stubs, waiting)
    # A name that is given twice counts once.
    assert (await delete(stubs, *done, waiting, waiting)).deleted_count == 3
    assert await listed(stubs) == set()


async def test_a_filter_deletes_the_ended_rollouts_that_it_selects_and_no_others(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "ROLLOUTS_PER_BATCH", 2)
    old = await ended(stubs, 5, priority=3)
    other = await ended(stubs, 1)
    of_run = await ended(stubs, 1, priority=3, training_run=RUN)
    waiting = await create(stubs, 1, priority=3)
    assert await delete_all(stubs, filter="priority = 3", training_run=RUN) == (1, 0, 1)
    assert await listed(stubs) == {*old, *other, *waiting}
    assert await delete_all(stubs, filter="priority = 3") == (5, 0, 3)
    assert await listed(stubs) == {*other, *waiting}
    assert await delete_all(stubs, filter="*") == (1, 0, 1)
    assert await listed(stubs) == set(waiting)
    assert not set(of_run) & await listed(stubs)


async def test_a_member_of_a_group_is_kept_until_all_have_ended(stubs: Stubs) -> None:
    names = await create(stubs, 3, group_id="g", group_size=3)
    runner = await Runner(stubs).open()
    first, second, third = await runner.take(3)
    await runner.complete([first, second])
    with pytest.raises(RolloutStateInvalid, match="group"):
        await delete(stubs, first.rollout.name)
    assert await delete_all(stubs, filter="*") == (0, 2, 1)
    await runner.complete([third])
    (group,), _ = await read_feed(stubs, groups=1)
    assert [each.name for each in group.rollouts] == sorted(names)
    assert (await delete(stubs, first.rollout.name)).deleted_count == 1
    # The rest of a group of which one is gone.
    assert await delete_all(stubs, filter="*") == (2, 0, 1)
    assert await listed(stubs) == set()


async def test_the_members_that_were_created_of_a_group_can_be_deleted_once_they_have_ended(stubs: Stubs) -> None:
    names = await create(stubs, 2, group_id="g", group_size=3)
    await cancel(stubs, *names)
    assert (await delete(stubs, *names)).deleted_count == 2
    assert len(await create(stubs, 3, group_id="g", group_size=3)) == 3


async def test_rollouts_of_a_training_run_are_kept_while_it_is_under_way(stubs: Stubs) -> None:
    create_lease = run_lease_service_pb2.CreateRunLeaseRequest(training_run=RUN)
    await stubs.run_leases.CreateRunLease(create_lease)
    acquire = run_lease_service_pb2.AcquireRunLeaseRequest(training_run=RUN, owner="o", owner_address="o:1")
    acquire.ttl.seconds = 60
    epoch = (await stubs.run_leases.AcquireRunLease(acquire)).lease.epoch
    (name,) = await ended(stubs, training_run=RUN)
    with pytest.raises(RolloutStateInvalid, match="training run"):
        await delete(stubs, name)
    assert await delete_all(stubs, filter="*") == (0, 1, 1)
    idle = run_lease_service_pb2.RUN_LEASE_STATE_IDLE
    await stubs.run_leases.ReleaseRunLease(
        run_lease_service_pb2.ReleaseRunLeaseRequest(training_run=RUN, epoch=epoch, state=idle)
    )
    assert (await delete(stubs, name)).deleted_count == 1


async def test_deletions_at_once_delete_each_rollout_once(stubs: Stubs) -> None:
    for group in "abcdefgh":
        await cancel(stubs, *await create(stubs, 4, group_id=group, group_size=4))
    answers = await asyncio.gather(*(delete(stubs, filter="*") for _ in range(4)))
    assert sum(answer.deleted_count for answer in answers) == 32
    assert await listed(stubs) == set()


async def test_requests_that_select_nothing_or_in_two_ways_are_refused(stubs: Stubs) -> None:
    (name,) = await ended(stubs)
    for request in (
        pb.DeleteRolloutsRequest(),
        pb.DeleteRolloutsRequest(names=[name], filter="*"),
        pb.DeleteRolloutsRequest(filter="state ="),
        pb.DeleteRolloutsRequest(names=["x"]),
    ):
        with pytest.raises(ArgumentInvalid):
            await stubs.rollouts.DeleteRollouts(request)
    with pytest.raises(PageTokenInvalid):
        await delete(stubs, filter="*", page_token="x")
    assert (await get(stubs, name)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
