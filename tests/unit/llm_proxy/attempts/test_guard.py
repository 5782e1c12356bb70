"""The guard of attempts: who is let through, who is asked about, and what is remembered."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import AttemptOver
from fulmen.ids import DEFAULT_PROJECT
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.attempts.guard import AttemptGuard, AttemptState, AttemptStatus, AttemptTie, _key
from tests.support.clock import Clock

LIVE = AttemptStatus(state=AttemptState.LIVE, project=DEFAULT_PROJECT, mode="train")
ENDED = AttemptStatus(state=AttemptState.ENDED, project=DEFAULT_PROJECT, mode="train")
STEPS = st.lists(st.tuples(st.sampled_from(["call", "leave", "ask", "end"]), st.integers(1, 4)), max_size=60)


class Call:
    """A call that notes whether it was ended."""

    def __init__(self) -> None:
        self.interrupted = 0

    def interrupt(self) -> None:
        """Notes it."""
        self.interrupted += 1


def of(number: int, *, expires_s: float = 100.0) -> Attribution:
    return Attribution(
        attempt=f"projects/default/rollouts/r/attempts/{number}",
        project=DEFAULT_PROJECT,
        epoch=number,
        mode="train",
        expires_s=expires_s,
    )


def test_a_call_is_let_through_before_the_store_has_spoken_and_refused_after() -> None:
    guard, call = AttemptGuard(clock=Clock(0.0)), Call()
    guard.enter(of(1), call)
    guard.require(of(1))
    assert guard.pending_checks() == [of(1)]
    assert guard.update(of(1), ENDED) == 1
    assert call.interrupted == 1
    for refuse in (guard.require, lambda who: guard.enter(who, Call())):
        with pytest.raises(AttemptOver) as raised:
            refuse(of(1))
        assert raised.value.metadata == {"attempt": "projects/default/rollouts/r/attempts/1", "why": "ended"}
    guard.require(of(2))


def test_what_calls_no_more_is_asked_about_once_and_then_forgotten() -> None:
    guard, call = AttemptGuard(clock=Clock(0.0)), Call()
    use = guard.enter(of(1), call)
    use.calls.discard(call)
    assert guard.pending_checks() == [of(1)]
    guard.update(of(1), LIVE)
    assert guard.pending_checks() == []
    assert not guard._busy.is_set()
    assert not guard._tracked


def test_what_could_not_be_asked_is_asked_again() -> None:
    guard, call = AttemptGuard(clock=Clock(0.0)), Call()
    guard.enter(of(1), call).calls.discard(call)
    guard.recheck(guard.pending_checks())
    assert guard.pending_checks() == [of(1)]


def test_a_refused_attempt_is_remembered_until_its_key_expires() -> None:
    clock = Clock(0.0)
    guard = AttemptGuard(clock=clock)
    guard.enter(of(1, expires_s=50), Call())
    guard.pending_checks()
    guard.update(of(1, expires_s=50), ENDED)
    clock.now_s = 49
    guard.pending_checks()
    with pytest.raises(AttemptOver):
        guard.require(of(1))
    clock.now_s = 50
    guard.pending_checks()
    assert not guard._tracked


def test_no_more_refused_attempts_are_remembered_than_allowed() -> None:
    guard = AttemptGuard(clock=Clock(0.0), max_refused=3)
    for number in range(1, 10):
        guard.enter(of(number, expires_s=100 + number), Call())
        guard.pending_checks()
        guard.update(of(number, expires_s=100 + number), ENDED)
    guard.pending_checks()
    assert sorted(key[1] for key in guard._tracked) == [7, 8, 9]


def test_a_key_of_another_project_than_its_rollouts_counts_for_nothing() -> None:
    guard = AttemptGuard(clock=Clock(0.0))
    guard.enter(of(1), Call())
    guard.pending_checks()
    guard.update(of(1), AttemptStatus(state=AttemptState.LIVE, project="projects/b", mode="train"))
    with pytest.raises(AttemptOver) as raised:
        guard.require(of(1))
    assert raised.value.metadata["why"] == "not_found"


@given(steps=STEPS)
def test_whatever_happens_the_ended_are_refused_and_only_callers_are_asked_about(steps: list[tuple[str, int]]) -> None:
    guard = AttemptGuard(clock=Clock(0.0))
    running: dict[int, list[Call]] = {}
    called: set[int] = set()
    ended: set[int] = set()
    known: set[int] = set()
    for step, number in steps:
        if step == "call":
            call = Call()
            try:
                guard.enter(of(number), call)
            except AttemptOver:
                assert number in known
                continue
            assert number not in known
            running.setdefault(number, []).append(call)
            called.add(number)
        elif step == "leave" and running.get(number):
            guard._tracked[_key(of(number))].calls.discard(running[number].pop())
        elif step == "end":
            ended.add(number)
        elif step == "ask":
            asked = {one.epoch for one in guard.pending_checks()}
            assert asked == (called | {n for n, calls in running.items() if calls}) - known
            for one in sorted(asked):
                guard.update(of(one), ENDED if one in ended else LIVE)
                if one in ended:
                    known.add(one)
                    assert all(call.interrupted == 1 for call in running.pop(one, []))
            called.clear()


@pytest.mark.parametrize(("is_cancelled", "error"), [(False, AttemptOver), (True, asyncio.CancelledError)])
async def test_a_held_call_ends_with_the_error_of_its_attempt_unless_somebody_else_cancels_it(
    is_cancelled: bool, error: type[BaseException]
) -> None:
    guard = AttemptGuard(clock=Clock(0.0))
    waiting = asyncio.Event()

    async def call() -> None:
        with AttemptTie(guard, of(1)):
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await waiting.wait()
    guard.pending_checks()
    if is_cancelled:
        task.cancel()
    guard.update(of(1), ENDED)
    with pytest.raises(error):
        await task
    assert task.cancelling() == is_cancelled
