"""A paused queue hands out nothing, at any replica, and everything else goes on."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import ArgumentInvalid, ProjectNotFound
from fulmen.store.v1 import rollout_pb2, runner_registry_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.rollouts import renewing
from tests.support.store.running import (
    LIMIT_S,
    Runner,
    StoreHandle,
    Stubs,
    create,
    create_project,
    get,
    queue_stats,
    replicas,
)

TEAM = "projects/team"


async def pause(stubs: Stubs, *stores: StoreHandle, **fields: str) -> pb.PauseQueueResponse:
    """Pauses a queue, and waits until stores know it."""
    answer: pb.PauseQueueResponse = await stubs.rollouts.PauseQueue(pb.PauseQueueRequest(**fields))
    for store in stores:
        await store.parts.roles["project-follower"].follow_once()
    return answer


async def resume(stubs: Stubs, **fields: str) -> bool:
    """Resumes a queue; returns whether it was paused."""
    return bool((await stubs.rollouts.ResumeQueue(pb.ResumeQueueRequest(**fields))).was_paused)


async def until_demanded(stubs: Stubs, count: int) -> None:
    """Waits until so many queued rollouts are said to need runners."""
    request = runner_registry_service_pb2.GetFleetDemandRequest()
    async with asyncio.timeout(LIMIT_S):
        while (await stubs.runners.GetFleetDemand(request)).queued_count != count:  # noqa: ASYNC110  # a count of the store
            await asyncio.sleep(0.05)


async def test_a_paused_queue_takes_rollouts_and_hands_out_none_until_it_is_resumed(
    store: StoreHandle, stubs: Stubs
) -> None:
    await create_project(stubs, TEAM)
    (before,) = await create(stubs, project=TEAM)
    await pause(stubs, store, project=TEAM)
    after = await create(stubs, 2, project=TEAM)
    async with renewing(await Runner(stubs).open()) as runner:
        await runner.demand(4)
        # What is created now could go to a waiting runner at once.
        for _ in range(2):
            (other,) = await create(stubs)
            assert [each.rollout.name for each in (await runner.expect("assign")).assignments] == [other]
            after += await create(stubs, project=TEAM)
        assert not runner.inbox
        assert (await queue_stats(stubs, project=TEAM)).queued_count == 5
        assert await resume(stubs, project=TEAM)
        taken = (await runner.expect("assign")).assignments
        while len(taken) < 2:
            taken += (await runner.expect("assign")).assignments
        assert [each.rollout.name for each in taken] == [before, min(after)]


async def test_what_runs_in_a_paused_queue_ends_and_its_retry_waits(store: StoreHandle, stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(retry_backoff={"nanos": 1_000_000})
    await create(stubs, 2, policy=policy)
    async with renewing(await Runner(stubs).open()) as runner:
        first, second = await runner.take(2)
        await pause(stubs, store)
        await runner.complete([first])
        await runner.complete([second], failure_kind="FAILURE_KIND_INFRA")
        await runner.demand(1)
        assert (await get(stubs, first.rollout.name)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
        assert (await get(stubs, second.rollout.name)).state != rollout_pb2.ROLLOUT_STATE_RUNNING
        assert await resume(stubs)
        (again,) = (await runner.expect("assign")).assignments
        assert again.rollout.name == second.rollout.name


async def test_a_pause_holds_at_every_replica(database_url: str) -> None:
    async with replicas(database_url, 2) as (here, there):
        stubs, others = await here.stubs(), await there.stubs()
        names = await create(others, 6)
        await pause(stubs, here, there)
        async with renewing(await Runner(others).open()) as runner:
            await runner.demand(6)
            # A project that is not paused is served meanwhile, so the replica has looked.
            await create_project(others, TEAM)
            (other,) = await create(others, project=TEAM)
            assert [each.rollout.name for each in (await runner.expect("assign")).assignments] == [other]
            assert (await queue_stats(others)).running_count == 0
            assert await resume(stubs)
            taken = list((await runner.expect("assign")).assignments)
            while len(taken) < 5:
                taken += (await runner.expect("assign")).assignments
            assert {each.rollout.name for each in taken} < set(names)


async def test_a_pause_is_shown_with_its_reason_and_is_the_same_if_it_is_repeated(stubs: Stubs) -> None:
    first = await pause(stubs, reason="new weights")
    stats = await queue_stats(stubs)
    assert (stats.pause_time, stats.pause_reason) == (first.pause_time, "new weights")
    assert (await pause(stubs, reason="newer weights")).pause_time == first.pause_time
    assert (await queue_stats(stubs)).pause_reason == "newer weights"
    assert await resume(stubs)
    assert not await resume(stubs)
    stats = await queue_stats(stubs)
    assert (stats.HasField("pause_time"), stats.pause_reason) == (False, "")


async def test_a_paused_queue_needs_no_runners(store: StoreHandle, stubs: Stubs) -> None:
    await create(stubs, 3)
    await until_demanded(stubs, 3)
    await pause(stubs, store)
    await until_demanded(stubs, 0)
    await resume(stubs)
    await until_demanded(stubs, 3)


async def test_a_pause_of_an_unknown_project_or_with_a_long_reason_is_refused(stubs: Stubs) -> None:
    with pytest.raises(ProjectNotFound):
        await pause(stubs, project="projects/nobody")
    with pytest.raises(ProjectNotFound):
        await resume(stubs, project="projects/nobody")
    with pytest.raises(ArgumentInvalid):
        await pause(stubs, reason="x" * 257)
