"""Accounts of attempts, the capture queue, and the slots of backends."""

from __future__ import annotations

import asyncio

import pytest

from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.routing.backend_state import BackendState, BackendStates, QueueFull
from fulmen_llm_proxy.routing.retry import RetryPolicy
from tests.support.clock import Clock
from tests.support.llm_proxy.finished_calls import finished

DEADLINE_S = 10


async def test_an_attempt_is_settled_when_no_call_runs_and_all_are_delivered() -> None:
    ledger = AttemptLedger(keep_s=60, clock=Clock())
    ledger.begin("a")
    waiting = asyncio.create_task(ledger.settled("a"))
    await asyncio.sleep(0)
    ledger.end("a", recorded=True, infra_failure=True)
    await asyncio.sleep(0)
    assert not waiting.done()
    ledger.delivered("a", calls=1, unusable=1, prompt_tokens=3, completion_tokens=4)
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    summary = ledger.summary("a")
    assert (summary.calls, summary.infra_failures, summary.unusable, summary.flushed) == (1, 1, 1, True)
    assert (summary.prompt_tokens, summary.completion_tokens) == (3, 4)


async def test_a_settled_account_is_forgotten_after_its_time_and_an_open_one_is_not() -> None:
    clock = Clock()
    ledger = AttemptLedger(keep_s=60, clock=clock)
    ledger.begin("open")
    ledger.begin("done")
    ledger.end("done", recorded=False, infra_failure=False)
    clock.now_s += 61
    ledger.begin("other")
    assert ledger.summary("open").calls == 1
    ledger.end("open", recorded=False, infra_failure=False)
    clock.now_s += 61
    ledger.begin("another")
    assert ledger.summary("open").calls == ledger.summary("done").calls == 0


async def test_the_queue_is_full_by_bytes_until_the_store_has_them() -> None:
    queue = CaptureQueue(max_bytes=100)
    for _ in range(3):
        queue.put(finished({}, None, size_bytes=40))
    assert queue.is_full
    taken = queue.take(max_calls=10, max_bytes=80)
    assert len(taken) == 2
    assert queue.is_full
    queue.release(taken)
    assert not queue.is_full
    rest = queue.take(max_calls=10, max_bytes=1)
    assert len(rest) == 1
    queue.release(rest)
    async with asyncio.timeout(DEADLINE_S):
        await queue.emptied()


def new_state() -> BackendState:
    return BackendStates(recheck_s=5, clock=Clock(), wall_clock=Clock()).of("a")


async def test_the_queue_is_crowded_from_half_of_its_bound_until_that_is_free_again() -> None:
    queue = CaptureQueue(max_bytes=100)
    queue.put(finished({}, None, size_bytes=50))
    crowded = asyncio.create_task(queue.crowded())
    await asyncio.sleep(0)
    assert not crowded.done()
    queue.put(finished({}, None, size_bytes=1))
    async with asyncio.timeout(DEADLINE_S):
        await crowded
    queue.release(queue.take(max_calls=1, max_bytes=100))
    again = asyncio.create_task(queue.crowded())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_what_waits_in_a_crowded_queue_waits_for_no_more() -> None:
    queue = CaptureQueue(max_bytes=100)
    queue.put(finished({}, None, size_bytes=40))
    due = asyncio.create_task(queue.due())
    await asyncio.sleep(0)
    assert not due.done()
    queue.put(finished({}, None, size_bytes=40))
    async with asyncio.timeout(DEADLINE_S):
        await due
        taken = queue.take(max_calls=1, max_bytes=100)
        await queue.due()
    queue.release([*taken, *queue.take(max_calls=1, max_bytes=100)])
    queue.put(finished({}, None, size_bytes=40))
    queue.release(queue.take(max_calls=1, max_bytes=100))
    due = asyncio.create_task(queue.due())
    await asyncio.sleep(0)
    assert not due.done()
    due.cancel()


async def test_what_an_earlier_process_recorded_counts_until_it_is_delivered_or_lost() -> None:
    ledger = AttemptLedger(keep_s=60, clock=Clock())
    ledger.adopt("a", calls=3)
    assert not ledger.summary("a").flushed
    ledger.delivered("a", calls=2, unusable=0)
    ledger.delivered("a", calls=1, unusable=1)
    summary = ledger.summary("a")
    assert (summary.flushed, summary.calls, summary.unusable) == (True, 3, 1)


async def test_slots_are_bounded_and_given_in_turn() -> None:
    state = new_state()
    await state.acquire(1, max_waiting=2)
    first, second = (
        asyncio.create_task(state.acquire(1, max_waiting=2)),
        asyncio.create_task(state.acquire(1, max_waiting=2)),
    )
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    state.release()
    async with asyncio.timeout(DEADLINE_S):
        await second
    assert state.in_flight == 1
    state.release()
    assert (state.in_flight, state.load) == (0, 0)


async def test_a_slot_handed_to_a_call_that_is_cancelled_at_that_moment_is_not_lost() -> None:
    state = new_state()
    await state.acquire(1, max_waiting=2)
    waiting = asyncio.create_task(state.acquire(1, max_waiting=2))
    await asyncio.sleep(0)
    state.release()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (state.in_flight, state.load) == (0, 0)


async def test_no_more_calls_wait_for_a_slot_than_may() -> None:
    state = new_state()
    await state.acquire(1, max_waiting=1)
    waiting = asyncio.create_task(state.acquire(1, max_waiting=1))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await state.acquire(1, max_waiting=1)
    assert (state.in_flight, state.waiting, state.load) == (1, 1, 2)
    state.release()
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_waits_grow_to_their_cap_with_jitter(draw: float) -> None:
    delays = RetryPolicy(deadline_s=1, first_delay_s=0.1, max_delay_s=0.8).delays(lambda: draw)
    means = [next(delays) / (0.5 + draw) for _ in range(6)]
    assert means == pytest.approx([0.1, 0.2, 0.4, 0.8, 0.8, 0.8])
