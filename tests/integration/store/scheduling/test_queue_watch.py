"""Watched queues: the first message at once, then changes alone, and one count for all who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fulmen.errors import Draining, ProjectNotFound
from fulmen.store.v1 import project_service_pb2, rollout_service_pb2
from fulmen.store.v1 import queue_service_pb2 as pb
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, create

ANYONE: dict[str, str] = {}


class Watcher:
    """A watcher of a queue."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self) -> pb.WatchQueueStatsResponse:
        """Reads a message."""
        async with asyncio.timeout(LIMIT_S):
            message: pb.WatchQueueStatsResponse = await self._stream.read()
        return message

    async def until(self, wanted: Callable[[pb.WatchQueueStatsResponse], bool]) -> pb.WatchQueueStatsResponse:
        """Reads until a message is as wanted."""
        while not wanted(message := await self.read()):
            pass
        return message


@asynccontextmanager
async def watching(stubs: Stubs, **selection: Any) -> AsyncIterator[Watcher]:
    stream = stubs.queues.WatchQueueStats(pb.WatchQueueStatsRequest(**selection))
    try:
        yield Watcher(stream)
    finally:
        stream.cancel()


def backlog_of(message: pb.WatchQueueStatsResponse) -> list[tuple[dict[str, str], int, int]]:
    return [(dict(each.labels), each.queued_count, each.running_count) for each in message.backlog]


async def test_the_first_message_comes_at_once_and_the_next_with_a_change(stubs: Stubs) -> None:
    async with watching(stubs) as watcher:
        first = await watcher.read()
        assert (first.stats.queued_count, first.stats.weight, backlog_of(first)) == (0, 100, [])
        await create(stubs, 3)
        grown = await watcher.until(lambda message: message.stats.queued_count == 3)
        assert backlog_of(grown) == [(ANYONE, 3, 0)]
        runner = await Runner(stubs).open()
        taken = await runner.take(1)
        running = await watcher.until(lambda message: message.stats.running_count == 1)
        assert (running.stats.runner_count, backlog_of(running)) == (1, [(ANYONE, 2, 1)])
        await runner.complete(taken)
        assert (await watcher.until(lambda message: not message.stats.running_count)).stats.queued_count == 2


async def test_that_time_passes_is_no_change(stubs: Stubs) -> None:
    await create(stubs, 1)
    async with watching(stubs) as watcher, watching(stubs) as other:
        assert (await watcher.read()).stats.queued_count == 1
        await other.read()
        reading = asyncio.create_task(watcher.read())
        # The other watcher shares the count: what it is told next is what came first, of both.
        await stubs.rollouts.PauseQueue(rollout_service_pb2.PauseQueueRequest(reason="later"))
        assert (await other.read()).stats.pause_reason == "later"
        assert (await reading).stats.pause_reason == "later"


async def test_a_backlog_is_told_by_labels_those_that_nobody_has_too(stubs: Stubs) -> None:
    await create(stubs, 2, required_labels={"gpu": "h200"})
    await create(stubs, 1)
    await Runner(stubs).open(labels={"gpu": "none"})
    async with watching(stubs) as watcher:
        message = await watcher.until(lambda message: bool(message.stats.unmatched))
    assert backlog_of(message) == [({"gpu": "h200"}, 2, 0), (ANYONE, 1, 0)]
    assert [(dict(each.labels), each.queued_count) for each in message.stats.unmatched] == [({"gpu": "h200"}, 2)]


async def test_a_training_run_is_watched_alone_before_it_has_rollouts(stubs: Stubs) -> None:
    mine = "projects/default/trainingRuns/mine"
    async with watching(stubs, training_run=mine) as watcher:
        assert not (await watcher.read()).stats.queued_count
        await create(stubs, 2)
        await create(stubs, 1, training_run=mine)
        assert (await watcher.until(lambda message: bool(message.backlog))).stats.queued_count == 1


async def test_a_queue_of_no_project_is_not_watched(stubs: Stubs) -> None:
    async with watching(stubs, project="projects/none") as watcher:
        with pytest.raises(ProjectNotFound):
            await watcher.read()


async def test_a_watch_ends_when_the_store_does(store: StoreHandle, stubs: Stubs) -> None:
    async with watching(stubs) as watcher:
        await watcher.read()
        await store.parts.drain()
        with pytest.raises(Draining):
            await watcher.read()


async def test_the_queues_of_projects_are_listed_with_shares_and_quotas(store: StoreHandle, stubs: Stubs) -> None:
    await stubs.projects.CreateProject(
        project_service_pb2.CreateProjectRequest(
            project=project_service_pb2.Project(name="projects/large", weight=300, max_running=2, max_queued=9)
        )
    )
    await create(stubs, 2)
    await create(stubs, 3, project="projects/large")
    runner = await Runner(stubs).open()
    await runner.take(1)
    await stubs.rollouts.PauseQueue(rollout_service_pb2.PauseQueueRequest(project="projects/large", reason="costs"))
    first = await stubs.queues.ListQueues(pb.ListQueuesRequest(page_size=1))
    second = await stubs.queues.ListQueues(pb.ListQueuesRequest(page_size=1, page_token=first.next_page_token))
    assert not second.next_page_token
    default, large = first.queues[0], second.queues[0]
    assert (default.project, default.weight, default.HasField("max_running")) == ("projects/default", 100, False)
    assert (large.weight, large.max_running, large.max_queued, large.pause_reason) == (300, 2, 9, "costs")
    assert large.HasField("pause_time")
    assert (default.queued_count + large.queued_count, default.running_count + large.running_count) == (4, 1)
    own = await store.stubs(project="projects/large")
    assert [each.project for each in (await own.queues.ListQueues(pb.ListQueuesRequest())).queues] == ["projects/large"]
