"""Quotas: what may wait is counted rarely and never passed; what may run is asked of the table."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import QuotaExceeded
from fulmen_store.scheduling.fair_queue import FairQueue
from fulmen_store.scheduling.matching import match
from fulmen_store.scheduling.quotas import QueueQuotas, RunningQuotas
from fulmen_store.scheduling.rules import QueueTerms
from fulmen_store.scheduling.table import QueueCount
from tests.support.store.manual_clock import ManualClock
from tests.support.store.memory_lease_table import MemoryLeaseTable
from tests.support.store.scheduling import new_items, runner_stream


class Backlog(ManualClock):
    """A counted backlog and a clock; a count takes `cost_s`."""

    def __init__(self, *, max_queued: int | None, queued: int = 0, cost_s: float = 0.0) -> None:
        self.max_queued, self.waiting, self.cost_s = max_queued, queued, cost_s
        super().__init__()
        self.counts = 0
        self.quotas = QueueQuotas(self, clock=self)

    async def queued(self, _project_id: int) -> QueueCount:
        self.counts += 1
        found = QueueCount(max_queued=self.max_queued, queued=self.waiting)
        self.now_s += self.cost_s
        await asyncio.sleep(0)
        return found


async def test_what_was_created_since_the_count_is_added_to_it() -> None:
    backlog = Backlog(max_queued=10, queued=4)
    await backlog.quotas.admit([1] * 3)
    await backlog.quotas.admit([1] * 3)
    with pytest.raises(QuotaExceeded) as refused:
        await backlog.quotas.admit([1])
    assert refused.value.retry_after_s == pytest.approx(1.0)
    assert refused.value.metadata["max_queued"] == "10"


async def test_a_backlog_is_not_counted_for_every_request() -> None:
    backlog = Backlog(max_queued=1_000_000, queued=500_000, cost_s=0.4)
    for _ in range(50):
        await backlog.quotas.admit([1] * 1000)
        backlog.now_s += 0.1
    assert backlog.counts == 1
    backlog.now_s += 10
    await backlog.quotas.admit([1])
    assert backlog.counts == 2


async def test_a_refusal_is_not_repeated_when_the_queue_has_room_again() -> None:
    backlog = Backlog(max_queued=2, queued=2)
    with pytest.raises(QuotaExceeded):
        await backlog.quotas.admit([1])
    backlog.waiting, backlog.now_s = 1, 0.2
    await backlog.quotas.admit([1])
    assert backlog.counts == 2


async def test_all_or_none_are_admitted() -> None:
    backlog = Backlog(max_queued=5)
    with pytest.raises(QuotaExceeded):
        await backlog.quotas.admit([1] * 5 + [2] * 6)
    await backlog.quotas.admit([1] * 5 + [2] * 5)


async def test_requests_at_the_same_time_do_not_pass_the_quota_together() -> None:
    backlog = Backlog(max_queued=5)
    answers = await asyncio.gather(*(backlog.quotas.admit([1] * 2) for _ in range(8)), return_exceptions=True)
    assert sum(answer is None for answer in answers) == 2


async def test_without_a_quota_anything_may_wait() -> None:
    backlog = Backlog(max_queued=None)
    for _ in range(100):
        await backlog.quotas.admit([1] * 1000)
    assert backlog.counts == 1


async def test_what_the_running_quota_refuses_waits_until_an_attempt_ends() -> None:
    table = MemoryLeaseTable(max_running=2)
    ready = FairQueue()
    ready.learn(1, QueueTerms(max_running=2))
    quotas = RunningQuotas(table, ready)
    stream = runner_stream(credit=10)
    for item in new_items(table, 5):
        ready.push(item)
    grants = await quotas.claim(match(ready, [stream], limit=100))
    assert len(grants) == 2
    assert len(ready) == 3
    assert match(ready, [stream], limit=100) == []
    del table.rows[grants[0].rollout_id]
    assert quotas.ended([1])
    assert not quotas.ended([2])
    assert len(await quotas.claim(match(ready, [stream], limit=100))) == 1
    # Another replica's attempt ended: nobody said so here, the next look finds out.
    del table.rows[grants[1].rollout_id]
    assert match(ready, [stream], limit=100) == []
    quotas.probe_again()
    assert len(await quotas.claim(match(ready, [stream], limit=100))) == 1
    assert len(ready) == 1
