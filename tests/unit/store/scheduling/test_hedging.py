"""Hedging: only what is late, only where the rule is on, only with credit that nothing else waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fulmen_store.events import QueueEvents
from fulmen_store.leases.leases import Grant, Project
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.duration_sketch import DurationSketch, bucket_of
from fulmen_store.scheduling.hedging import MIN_SAMPLES, Hedger
from fulmen_store.scheduling.rules import QueueRules, QueueTerms
from fulmen_store.scheduling.runner_streams import Assigned, RunnerStream, RunnerStreams
from tests.support.store.memory_lease_table import MemoryLeaseTable
from tests.support.store.scheduling import new_items, ready_item, runner_stream

SLOW_S = 100.0


class KnownDurations:
    """Knows the durations of task type 1."""

    def __init__(self, sketch: DurationSketch) -> None:
        self.sketch = {1: sketch}.get


class World:
    """A running rollout of task type 1, whose attempts take a second, and a dispatcher with nothing else to do."""

    def __init__(self, *, hedging: bool = True, samples: int = MIN_SAMPLES, hedged: bool = True) -> None:
        self.table, self.streams, self.sketch = MemoryLeaseTable(), RunnerStreams(), DurationSketch()
        self.sketch.add(bucket_of(1.0), samples)
        self.dispatcher = Dispatcher(table=self.table, streams=self.streams, events=QueueEvents(), poll_interval_s=60)
        self.hedger = Hedger(table=self.table, dispatcher=self.dispatcher, durations=KnownDurations(self.sketch))
        self.terms = QueueTerms(rules=QueueRules(hedging=hedging), max_running=1)
        (self.item,) = new_items(self.table, task_type=1, hedged=hedged)
        self.first = runner_stream(self.streams)

    @asynccontextmanager
    async def running(self, age_s: float) -> AsyncIterator[None]:
        (grant,) = await self.table.claim([(self.item.rollout_id, self.first.session_id)])
        self.first.leases[grant.rollout_id] = grant.epoch
        self.table.rows[self.item.rollout_id].leased_at = time.monotonic() - age_s
        role = asyncio.create_task(self.dispatcher.run())
        async with asyncio.timeout(10):
            while not self.dispatcher._settled:  # noqa: ASYNC110  # its first look round
                await asyncio.sleep(0.001)
        self.dispatcher.update_project(Project(project_id=1, name="projects/default", terms=self.terms))
        yield
        role.cancel()


def grants_of(stream: RunnerStream) -> list[Grant]:
    notice = stream.outbox.take()
    return list(notice.grants) if isinstance(notice, Assigned) else []


async def test_an_attempt_that_takes_longer_than_its_kind_is_started_a_second_time() -> None:
    """A quota of one does not stand against it: it is the same rollout."""
    world = World()
    idle = runner_stream(world.streams, credit=2)
    async with world.running(SLOW_S):
        assert await world.hedger.hedge_once() == 1
        (grant,) = grants_of(idle)
        assert (grant.rollout_id, grant.epoch, idle.credit) == (world.item.rollout_id, 2, 1)
        assert idle.leases == {world.item.rollout_id: grant.attempt}
        assert await world.hedger.hedge_once() == 0


@pytest.mark.parametrize(
    ("world", "age_s"),
    [
        pytest.param(World(hedging=False), SLOW_S, id="the rule is off"),
        pytest.param(World(hedged=False), SLOW_S, id="the rollout does not ask for it"),
        pytest.param(World(samples=MIN_SAMPLES - 1), SLOW_S, id="too little is known"),
        pytest.param(World(), 0.5, id="it is not late"),
    ],
)
async def test_nothing_is_hedged_that_is_not_to_be(world: World, age_s: float) -> None:
    idle = runner_stream(world.streams, credit=1)
    async with world.running(age_s):
        assert await world.hedger.hedge_once() == 0
    assert idle.credit == 1


async def test_the_runner_that_is_late_does_not_hedge_itself() -> None:
    world = World()
    world.first.credit = 5
    async with world.running(SLOW_S):
        assert await world.hedger.hedge_once() == 0
    assert world.first.credit == 5


async def test_work_that_waits_goes_before_a_hedge() -> None:
    world = World()
    async with world.running(SLOW_S):
        idle = runner_stream(world.streams, credit=1)
        world.dispatcher.offer([(ready_item(), 0.0)])
        assert await world.hedger.hedge_once() == 0
    assert idle.credit == 1


async def test_a_hedge_that_came_too_late_gives_the_credit_back() -> None:
    world = World()
    idle = runner_stream(world.streams, credit=1)
    async with world.running(SLOW_S):
        row = world.table.rows[world.item.rollout_id]

        class Ending(MemoryLeaseTable):
            """Lets the first attempt end between look and claim."""

            async def claim_hedges(self, choices: object) -> list[Grant]:
                row.session_id = None
                return await MemoryLeaseTable.claim_hedges(self, choices)  # type: ignore[arg-type]  # passed on

        hedger = Hedger(
            table=Ending(rows=world.table.rows), dispatcher=world.dispatcher, durations=KnownDurations(world.sketch)
        )
        assert await hedger.hedge_once() == 0
    assert idle.credit == 1
    assert grants_of(idle) == []
