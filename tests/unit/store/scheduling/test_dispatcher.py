"""The dispatcher: it never exceeds credit, and what it cannot deliver goes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fulmen.errors import DatabaseUnavailable
from fulmen.ids import uuid7
from fulmen_store.events import QueueEvents
from fulmen_store.leases.leases import AttemptReport, Grant
from fulmen_store.rollouts.requests import MAX_STORED_BYTES
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.scheduling.backlog import REFILL_PAGE
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.runner_streams import (
    MAX_ASSIGNMENT_BYTES,
    OUTBOX_BYTES,
    Assigned,
    RunnerStream,
    RunnerStreams,
)
from tests.support.store.memory_lease_table import MemoryLeaseTable
from tests.support.store.scheduling import POLICY, new_items, ready_item, runner_stream


class CountingMeter:
    """Counts what is handed out, and how much of that was claimed after it was created."""

    def __init__(self) -> None:
        self.count = self.claimed = 0

    def dispatched(self, count: int, latency_s: float | None) -> None:
        self.count += count
        self.claimed += 0 if latency_s is None else count

    def claims_lost(self, count: int) -> None:
        pass


class World:
    """A dispatcher over a table in memory."""

    def __init__(self, table: MemoryLeaseTable | None = None) -> None:
        self.table = table or MemoryLeaseTable()
        self.streams = RunnerStreams()
        self.returned: list[AttemptReport] = []
        self.meter = CountingMeter()
        events = QueueEvents()
        events.leases_undelivered.subscribe(self.returned.extend)
        self.dispatcher = Dispatcher(
            table=self.table,
            streams=self.streams,
            events=events,
            poll_interval_s=0.01,
            metrics=self.meter,
        )

    def add(self, count: int, *, offer: bool = True) -> None:
        items = new_items(self.table, count)
        if offer:
            self.dispatcher.offer([(item, 0.0) for item in items])

    def stream(self, credit: int) -> RunnerStream:
        stream = runner_stream(self.streams)
        self.dispatcher.add_credit(stream, credit)
        return stream


async def taken(stream: RunnerStream) -> Sequence[Grant]:
    await stream.outbox.wait()
    notice = stream.outbox.take()
    assert isinstance(notice, Assigned)
    return notice.grants


async def test_streams_share_the_work_and_get_no_more_than_their_credit() -> None:
    world = World()
    world.add(10)
    one, two = world.stream(3), world.stream(2)
    async with asyncio.timeout(10), running(world):
        assert [len(await taken(one)), len(await taken(two))] == [3, 2]
        assert (one.credit, two.credit) == (0, 0)
        world.dispatcher.add_credit(one, 5)
        assert len(await taken(one)) == 5


async def test_a_stream_gets_no_more_bytes_than_it_has_room_for_until_they_are_sent() -> None:
    world = World()
    items = new_items(world.table, 50, request_bytes=MAX_STORED_BYTES)
    world.dispatcher.offer([(item, 0.0) for item in items])
    stream = world.stream(60)
    async with asyncio.timeout(10), running(world):
        first = await taken(stream)
        assert len(first) == OUTBOX_BYTES // MAX_ASSIGNMENT_BYTES
        assert (stream.credit, stream.can_take) == (60 - len(first), False)
        world.dispatcher.make_room(stream)
        second = await taken(stream)
    assert len({grant.rollout_id for grant in (*first, *second)}) == 50


async def test_what_another_replica_took_first_gives_the_room_back() -> None:
    world = World()
    async with asyncio.timeout(10), idle(world):
        stream = world.stream(1)
        for _ in range(100):
            matches = world.dispatcher.match_new([ready_item(request_bytes=MAX_STORED_BYTES)])
            world.dispatcher.deliver_new(matches, [])
    assert (stream.credit, stream.room_bytes) == (1, OUTBOX_BYTES)


async def test_work_that_nobody_told_it_about_is_found_in_the_table() -> None:
    world = World()
    world.add(3, offer=False)
    stream = world.stream(5)
    async with asyncio.timeout(10), running(world):
        assert len(await taken(stream)) == 3
    assert stream.credit == 2


async def test_what_another_replica_took_first_gives_the_credit_back() -> None:
    world = World()
    world.add(1)
    (row,) = world.table.rows.values()
    row.session_id, row.epoch, row.granted = uuid7(), 1, 1
    stream = world.stream(1)
    async with asyncio.timeout(10), running(world):
        world.add(1)
        (grant,) = await taken(stream)
    assert grant.rollout_id != row.item.rollout_id


async def test_a_lease_whose_commit_was_in_doubt_is_given_back_and_handed_out_again() -> None:
    class Doubtful(MemoryLeaseTable):
        """Commits the first claim and loses its answer."""

        lost = False

        async def claim(self, choices: Sequence[tuple[object, object]]) -> list[Grant]:
            grants = await MemoryLeaseTable.claim(self, choices)  # type: ignore[arg-type]  # narrowed by the port
            if not self.lost:
                self.lost = True
                raise DatabaseUnavailable("the answer was lost")
            return grants

    world = World(Doubtful())
    world.add(1)
    world.stream(1)
    async with asyncio.timeout(10), running(world):
        while not world.returned:  # noqa: ASYNC110  # the dispatcher's own pause
            await asyncio.sleep(0.01)
    (report,) = world.returned
    assert report.epoch == 1


async def test_a_runner_that_left_while_its_claim_was_committed_costs_nothing() -> None:
    class Leaving(MemoryLeaseTable):
        """Lets the runner leave during the claim."""

        async def claim(self, choices: Sequence[tuple[object, object]]) -> list[Grant]:
            world.streams.detach(stream)
            return await MemoryLeaseTable.claim(self, choices)  # type: ignore[arg-type]  # narrowed by the port

    world = World(Leaving())
    world.add(1)
    stream = world.stream(1)
    async with asyncio.timeout(10), running(world):
        while not world.returned:  # noqa: ASYNC110  # no signal is given for it
            await asyncio.sleep(0.01)
    assert stream.outbox.take() is None


async def test_what_has_waited_long_behind_more_urgent_work_than_fits_in_memory_goes_first() -> None:
    world = World()
    new_items(world.table, REFILL_PAGE + 100, sort_priority=-5)
    (meek,) = new_items(world.table, sort_priority=5, since_s=time.time() - 100_000)
    stream = world.stream(1)
    async with asyncio.timeout(10), running(world):
        (grant,) = await taken(stream)
    assert grant.rollout_id == meek.rollout_id


async def test_new_work_finds_a_runner_that_waits_and_uses_its_credit() -> None:
    world = World()
    async with asyncio.timeout(10), idle(world):
        stream = world.stream(1)
        first, second = (ready_item() for _ in range(2))
        assert world.dispatcher.match_new([first, second]) == {first.rollout_id: stream}
        assert stream.credit == 0


async def test_what_is_handed_out_counts_whether_it_was_created_with_its_lease_or_claimed_later() -> None:
    world = World()
    async with asyncio.timeout(10), idle(world):
        stream = world.stream(3)
        new = ready_item()
        matches = world.dispatcher.match_new([new])
        world.table.add(new, POLICY)
        world.dispatcher.deliver_new(matches, await world.table.claim([(new.rollout_id, stream.session_id)]))
        assert (world.meter.count, world.meter.claimed) == (1, 0)
        await taken(stream)
        world.add(2)
        while world.meter.count < 3:  # noqa: ASYNC110  # bounded by the timeout
            await asyncio.sleep(0)
    assert world.meter.claimed == 2


async def test_new_work_does_not_pass_work_that_waits() -> None:
    world = World()
    async with asyncio.timeout(10), idle(world):
        world.add(1)
        world.stream(5)
        assert not world.dispatcher.match_new([ready_item()])


async def test_matches_of_which_nothing_was_created_give_their_credit_back() -> None:
    world = World()
    async with asyncio.timeout(10), idle(world):
        stream = world.stream(2)
        items = [ready_item() for _ in range(2)]
        matches = world.dispatcher.match_new(items)
        world.dispatcher.unmatch(matches)
        assert stream.credit == 2
        matches = world.dispatcher.match_new(items)
        grant = Grant(rollout_id=items[0].rollout_id, session_id=stream.session_id, epoch=1, project_id=1, request=b"")
        world.dispatcher.deliver_new(matches, [grant])
        assert stream.credit == 1
        assert await taken(stream) == [grant]


async def test_a_creation_whose_outcome_is_unknown_leaves_no_lease_behind() -> None:
    world = World()
    async with asyncio.timeout(10), idle(world):
        stream = world.stream(1)
        item = ready_item()
        matches = world.dispatcher.match_new([item])
        # It was created with its lease, but the answer was lost.
        world.table.add(item, POLICY)
        (grant,) = await world.table.claim([(item.rollout_id, stream.session_id)])
        world.dispatcher.mark_in_doubt(matches)
        while not world.returned:  # noqa: ASYNC110  # bounded by the timeout
            await asyncio.sleep(0)
        assert [(one.rollout_id, one.epoch, one.kind) for one in world.returned] == [
            (grant.rollout_id, grant.epoch, FailureKind.RELEASED)
        ]


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    """Runs the dispatcher."""
    role = asyncio.create_task(world.dispatcher.run())
    yield
    role.cancel()


@asynccontextmanager
async def idle(world: World) -> AsyncIterator[None]:
    """Runs the dispatcher until it has nothing to do, and on."""
    role = asyncio.create_task(world.dispatcher.run())
    probe = world.stream(1)
    item = ready_item()
    while not (matches := world.dispatcher.match_new([item])):  # noqa: ASYNC110  # bounded by the caller
        await asyncio.sleep(0)
    world.dispatcher.unmatch(matches)
    world.streams.detach(probe)
    yield
    role.cancel()
