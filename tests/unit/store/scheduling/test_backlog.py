"""The backlog: no work stays hidden behind work that nobody here can use, and looking for it stays cheap."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from fulmen.ids import uuid7
from fulmen_store.leases.leases import Project
from fulmen_store.scheduling import backlog as backlog_module
from fulmen_store.scheduling.backlog import LOW_WATER, MAX_REFILL_PAGES, REFILL_PAGE, Backlog
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.rules import QueueRules, QueueTerms
from fulmen_store.scheduling.runner_streams import RunnerStreams
from fulmen_store.scheduling.work_stealing import STEAL_DELAY_S
from tests.support.store.manual_clock import ManualClock
from tests.support.store.memory_lease_table import MemoryLeaseTable
from tests.support.store.scheduling import POLICY, new_items, ready_item, runner_stream

POLL_INTERVAL_S = 0.5
GPU = frozenset({"gpu=yes"})


class ReadTable(MemoryLeaseTable):
    """A table that counts the pages that were read."""

    pages = 0

    async def waiting(self, project_id: int, *, after: tuple[int, UUID], limit: int) -> list[tuple[ReadyItem, float]]:
        """Returns one page of waiting items in order."""
        self.pages += 1
        return await MemoryLeaseTable.waiting(self, project_id, after=after, limit=limit)


class Preference:
    """Live replicas of which one is preferred to this one for some rollouts."""

    def __init__(self, others: frozenset[int]) -> None:
        self._others = others

    def rank(self, key: UUID) -> int:
        return int(key.int in self._others)


class World:
    """A backlog with a clock of its own, one runner, and a table whose pages are counted."""

    def __init__(self, *, others: frozenset[int] = frozenset()) -> None:
        self.clock = ManualClock()
        self.table, self.streams = ReadTable(), RunnerStreams()
        self.stream = runner_stream(self.streams, credit=1)
        self.backlog = Backlog(
            table=self.table,
            streams=self.streams,
            poll_interval_s=POLL_INTERVAL_S,
            replicas=Preference(others),
            clock=self.clock,
        )

    def add(self, count: int = 1, **fields: Any) -> list[ReadyItem]:
        return new_items(self.table, count, **fields)

    async def poll(self) -> int:
        """Lets the poll interval pass and refills; returns how many pages were read."""
        self.clock.now_s += POLL_INTERVAL_S
        self.table.pages = 0
        await self.backlog.refill()
        return self.table.pages

    async def read_all(self) -> None:
        """Polls until all that waits has been read."""
        for _ in range(100):
            if await self.poll() == 1 and await self.poll() == 1:
                return
        pytest.fail("the polls never came to rest")

    def next(self) -> ReadyItem | None:
        """Hands the next item out; it does not wait in the table any more."""
        item = self.backlog.ready.pop(self.stream.labels)
        if item is not None:
            del self.table.rows[item.rollout_id]
        return item


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes everything a hundredth as large; returns the rows of a page."""
    page = REFILL_PAGE // 100
    monkeypatch.setattr(backlog_module, "REFILL_PAGE", page)
    monkeypatch.setattr(backlog_module, "WINDOW_MARGIN", page)
    monkeypatch.setattr(backlog_module, "OLDEST_PER_PRIORITY", 1)
    monkeypatch.setattr(backlog_module, "LOW_WATER", LOW_WATER // 100)
    monkeypatch.setattr(backlog_module, "WINDOW_PER_PROJECT", 25 * page)
    return page


@pytest.mark.parametrize("pages", [3, 15, 60])
async def test_work_behind_a_long_backlog_that_no_runner_here_can_use_is_found(small_pages: int, pages: int) -> None:
    world = World()
    world.add(pages * small_pages, labels=GPU)
    (wanted,) = world.add()
    for _ in range(pages + 1):
        await world.poll()
    assert world.next() == wanted
    assert len(world.backlog) <= 25 * small_pages


async def test_a_poll_without_news_reads_one_page_however_long_the_backlog(small_pages: int) -> None:
    world = World()
    world.add(2 * MAX_REFILL_PAGES * small_pages, labels=GPU)
    await world.read_all()
    assert [await world.poll() for _ in range(30)] == [1] * 30
    assert len(world.backlog) == 2 * MAX_REFILL_PAGES * small_pages


async def test_work_of_which_nobody_told_is_found_wherever_it_lies(small_pages: int) -> None:
    pages = 12
    for sort_priority in (-1, 0, 1):
        world = World()
        world.add(pages * small_pages, labels=GPU)
        await world.read_all()
        (wanted,) = world.add(sort_priority=sort_priority)
        for _ in range(pages + 1):
            assert await world.poll() <= 2
        assert world.next() == wanted


async def test_a_hint_is_followed_through_the_whole_backlog_and_first_at_its_head(small_pages: int) -> None:
    world = World()
    world.add(2 * MAX_REFILL_PAGES * small_pages, labels=GPU)
    await world.read_all()
    (last,), (first,) = world.add(), world.add(sort_priority=-1)
    world.backlog.hint([1])
    await world.backlog.refill()
    assert world.next() == first
    await world.poll()
    await world.poll()
    assert world.next() == last


async def test_more_urgent_work_goes_first_while_a_long_backlog_is_handed_out(small_pages: int) -> None:
    world = World()
    world.add(4 * small_pages)
    await world.poll()
    urgent = world.add(sort_priority=-1)[0]
    taken = []
    while world.backlog.ready.count_of(1):
        item = world.next()
        assert item is not None
        taken.append(item)
        await world.backlog.refill()
    assert len(taken) == 4 * small_pages + 1
    assert taken.index(urgent) <= small_pages


async def test_what_found_no_room_is_read_when_there_is_room_again(small_pages: int) -> None:
    world = World()
    world.stream.credit = 0
    items = world.add(40 * small_pages)
    world.backlog.offer([(item, 0.0) for item in items])
    assert len(world.backlog) == 25 * small_pages
    taken = []
    while (one := world.next()) is not None:
        taken.append(one)
        await world.backlog.refill()
    assert len(taken) == len(items)


async def test_a_runner_of_another_kind_finds_what_was_left_out_for_want_of_it(small_pages: int) -> None:
    world = World()
    world.add(30 * small_pages, labels=frozenset({"arch=arm"}))
    (wanted,) = world.add(labels=GPU)
    await world.read_all()
    runner_stream(world.streams, labels=GPU, credit=1)
    for _ in range(4):
        await world.poll()
    assert world.backlog.ready.pop(GPU) == wanted


async def test_others_work_is_added_for_credit_of_its_project_and_labels_only() -> None:
    ids = [uuid7() for _ in range(4)]
    for labels, projects, rules, count in (
        (frozenset[str](), None, QueueRules(), 0),
        (GPU, frozenset({1}), QueueRules(), 2),
        (GPU, frozenset({2}), QueueRules(), 0),
        (frozenset[str](), None, QueueRules(match_labels=False), 2),
    ):
        world = World(others=frozenset(one.int for one in ids))
        world.stream.labels, world.stream.projects = labels, projects
        for rollout_id in ids:
            world.table.add(ReadyItem(rollout_id=rollout_id, project_id=1, labels=GPU), POLICY)
        await world.poll()
        world.backlog.update_project(Project(project_id=1, name="projects/default", terms=QueueTerms(rules=rules)))
        world.clock.now_s += STEAL_DELAY_S
        assert await world.backlog.steal() == bool(count)
        assert len(world.backlog) == count


async def test_others_work_behind_a_long_backlog_is_found_and_costs_a_poll_nothing_if_it_fits_nobody(
    small_pages: int,
) -> None:
    rows, others = [ready_item(labels=GPU) for _ in range(12 * small_pages)], [ready_item() for _ in range(4)]
    world = World(others=frozenset(one.rollout_id.int for one in (*rows, *others)))
    for item in rows:
        world.table.add(item, POLICY)
    for _ in range(4):
        await world.poll()
        world.clock.now_s += STEAL_DELAY_S
        assert not await world.backlog.steal()
    for _ in range(30):
        assert await world.poll() == 1
        world.clock.now_s += STEAL_DELAY_S
        assert not await world.backlog.steal()
        assert world.table.pages == 1
    for item in others:
        world.table.add(item, POLICY)
    found = False
    for _ in range(14):
        await world.poll()
        world.clock.now_s += STEAL_DELAY_S
        found = found or await world.backlog.steal()
    assert found
    assert world.next() in others


async def test_urgent_work_of_another_replica_is_found_although_all_runners_are_busy() -> None:
    world = World()
    world.add(LOW_WATER + 100)
    await world.read_all()
    world.stream.credit = 0
    (urgent,) = world.add(sort_priority=-10)
    assert await world.poll() == 1
    world.stream.credit = 1
    assert world.next() == urgent


async def test_a_hint_is_followed_at_the_next_poll_although_all_runners_are_busy() -> None:
    world = World()
    world.backlog.update_project(Project(project_id=1, name="projects/one", terms=QueueTerms()))
    world.stream.credit = 0
    (item,) = world.add()
    assert await world.poll() == 0
    world.backlog.hint([1])
    assert await world.poll() == 1
    assert item.rollout_id in world.backlog.ready
