"""Groups of a run at the store: few requests, in order, and each created once whatever an earlier life has sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from fulmen.errors import QuotaExceeded, RunLeaseLost
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import project_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_algorithm.clients import store as clients
from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.clients.store import RolloutRequest, StoreQueue
from fulmen_algorithm.rollouts.groups import GroupSpec, in_branch, train_group_id
from fulmen_algorithm.runs.ports import RunFence, RunRecord
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle, Stubs

RUN = "projects/default/trainingRuns/one"
# As long as names may be.
PROJECT = f"projects/{'p' * 63}"
LONG_RUN = f"{PROJECT}/trainingRuns/{'r' * 63}"
SIZE = 4


class Lives:
    """A run at a store, and its lives: each has an epoch of its own."""

    def __init__(self, channel: FulmenChannel, run: str = RUN) -> None:
        self.channel = channel
        self.run = run
        self.notices: list[str] = []
        self.leases = StoreRunLeases(channel, owner="a", storage="s", address=lambda: "a:1", ttl_s=60)

    async def next(self, *, limit_s: float = 10) -> StoreQueue:
        epoch = await self.leases.acquire(self.run, after_epoch=0, for_change=False)
        request = RolloutRequest(
            project=self.run.partition("/trainingRuns/")[0],
            training_run=self.run,
            agent="",
            attempt_timeout_s=60,
            max_attempts=1,
            fence=RunFence(training_run=self.run, epoch=epoch),
        )
        patience = Patience(service="store", notify=lambda _, text: self.notices.append(text), limit_s=limit_s)
        return StoreQueue(self.channel, request, patience)


@pytest.fixture
async def lives(store: StoreHandle) -> AsyncIterator[Lives]:
    async with open_channel(store.target, token=store.token(Role.SERVICE)) as channel:
        lives = Lives(channel)
        await lives.leases.create([RunRecord(training_run=RUN, policy="p", record=b"r")], request_id="")
        yield lives


def groups(*indices: int, branch: int = 0, task: bytes = b"{}") -> list[GroupSpec]:
    return [GroupSpec(group_id=in_branch(train_group_id(i), branch), task=task, size=SIZE) for i in indices]


async def stored(stubs: Stubs) -> list[str]:
    """Returns the group of each rollout, oldest first."""
    page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(training_run=RUN, page_size=1000))
    assert not page.next_page_token
    return [rollout.group_id for rollout in reversed(page.rollouts)]


async def allow_queued(stubs: Stubs, count: int) -> None:
    """Limits how many rollouts of the project may wait."""
    name = "projects/default"
    read = (await stubs.projects.GetProject(project_service_pb2.GetProjectRequest(name=name))).project
    changed = project_service_pb2.Project(name=name, etag=read.etag, max_queued=count)
    await stubs.projects.UpdateProject(project_service_pb2.UpdateProjectRequest(project=changed))


def whole(*indices: int) -> list[str]:
    return [train_group_id(i) for i in indices for _ in range(SIZE)]


async def requests(database_url: str) -> int:
    connection = await asyncpg.connect(database_url)
    try:
        return await connection.fetchval("select count(*) from request_log")
    finally:
        await connection.close()


async def test_the_groups_of_a_step_are_one_request_and_are_queued_in_their_order(
    lives: Lives, stubs: Stubs, database_url: str
):
    queue = await lives.next()
    await queue.submit(groups(*range(40)))
    assert await stored(stubs) == whole(*range(40))
    assert await requests(database_url) == 1


async def test_a_request_has_a_bounded_number_of_rollouts_and_bytes(
    lives: Lives, stubs: Stubs, database_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "ROLLOUTS_PER_REQUEST", 3 * SIZE + 1)
    monkeypatch.setattr(clients, "BYTES_PER_REQUEST", 2 * SIZE * 100)
    queue = await lives.next()
    await queue.submit(groups(*range(7)))
    assert await requests(database_url) == 3
    await queue.submit(groups(*range(7, 12), task=b'"' + b"x" * 98 + b'"'))
    assert await requests(database_url) == 6
    await queue.submit(groups(12, 13, task=b'"' + b"x" * 998 + b'"'))
    assert await requests(database_url) == 8
    assert await stored(stubs) == whole(*range(14))


async def test_a_full_queue_is_waited_for_and_takes_the_groups_in_their_order(lives: Lives, stubs: Stubs):
    await allow_queued(stubs, 2 * SIZE)
    queue = await lives.next()
    submitting = asyncio.create_task(queue.submit(groups(0, 1, 2, 3)))
    gone: set[str] = set()
    while not submitting.done():
        page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(training_run=RUN, page_size=1000))
        if lives.notices and (oldest := [each.name for each in page.rollouts if each.name not in gone][-SIZE:]):
            await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=oldest))
            gone.update(oldest)
        await asyncio.sleep(0.1)
    await submitting
    assert await stored(stubs) == whole(0, 1, 2, 3)
    assert all("waits for space in the queue" in notice for notice in lives.notices)


async def test_a_group_that_no_queue_of_the_project_can_hold_is_refused_with_the_reason(lives: Lives, stubs: Stubs):
    await allow_queued(stubs, SIZE - 1)
    queue = await lives.next(limit_s=1)
    with pytest.raises(QuotaExceeded, match="quota of waiting rollouts"):
        await queue.submit(groups(0))
    assert await stored(stubs) == []


async def test_a_run_with_the_longest_names_submits_its_groups(store: StoreHandle, stubs: Stubs):
    await stubs.projects.CreateProject(
        project_service_pb2.CreateProjectRequest(project=project_service_pb2.Project(name=PROJECT))
    )
    token = store.token(Role.SERVICE, project="projects/*")
    async with open_channel(store.target, token=token) as channel:
        lives = Lives(channel, LONG_RUN)
        await lives.leases.create([RunRecord(training_run=LONG_RUN, policy="p", record=b"r")], request_id="")
        queue = await lives.next()
        await queue.submit(groups(10_000_000, 10_000_001))
        assert await queue.known_train_groups(below=0, branch=0) == {10_000_000, 10_000_001}


async def test_a_repeated_request_creates_nothing_twice(lives: Lives, stubs: Stubs):
    queue = await lives.next()
    await asyncio.gather(*(queue.submit(groups(0, 1, 2)) for _ in range(3)))
    assert await stored(stubs) == whole(0, 1, 2)


async def test_what_an_earlier_life_still_sends_is_refused_and_the_next_one_sends_the_rest_in_other_requests(
    lives: Lives, stubs: Stubs
):
    first = await lives.next()
    await first.submit(groups(0, 1, 2))
    second = await lives.next()
    with pytest.raises(RunLeaseLost):
        await first.submit(groups(3, 4, 5, 6))
    assert await second.known_train_groups(below=0, branch=0) == {0, 1, 2}
    await second.submit(groups(3, 4))
    await second.submit(groups(5, 6, 7))
    third = await lives.next()
    assert await third.known_train_groups(below=4, branch=0) == {4, 5, 6, 7}
    assert await stored(stubs) == whole(*range(8))


@pytest.mark.parametrize("page", [3, 7, 1000])
async def test_all_groups_of_a_request_are_known_wherever_a_page_ends(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, page: int
):
    # As with a store of an earlier version, whose rollouts of one request are in no order.
    monkeypatch.setattr("fulmen_store.rollouts.rollouts.sorted", list, raising=False)
    monkeypatch.setattr(clients, "LIST_PAGE", page)
    queue = await lives.next()
    await queue.submit(groups(0, 1))
    await queue.submit(groups(2, 3, 4, 5))
    await queue.submit(groups(2, 3, branch=1))
    assert await queue.known_train_groups(below=3, branch=1) == {3}
    await queue.submit(groups(4, 5, 6, branch=1))
    assert await queue.known_train_groups(below=3, branch=1) == {3, 4, 5, 6}
