"""Attempts stay where their conversations are cached, and only as many call as the cache holds."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import Balancing, Replica, pick, seed_of
from fulmen_llm_proxy.routing.seats import IDLE_S, Row, Seat, Seats
from tests.support.llm_proxy.places import Clock, Keys, break_down, new_states

DEADLINE_S = 30


def replicas(*weights: int) -> list[Replica]:
    return [
        Replica(index=i, backend_id=name, weight=weight, seed=seed_of(name), max_in_flight=1024)
        for i, (name, weight) in enumerate(zip("abcd", weights, strict=False))
    ]


def sit(states: BackendStates, attempt: int, held: list[Replica]) -> str:
    """Routes a call of an attempt as the planner does; returns its backend."""
    seat = states.seats.find(attempt, "m")
    key = Keys(attempt=attempt, is_named=True)
    name = pick(held, states=states, affinity=key, balancing=Balancing.STICKY, seat=seat).backend_id
    states.seats.take(attempt, "m", states.of(name).row)
    return name


def seated(row: Row, seats: Seats, *tokens: int) -> list[Seat]:
    """Seats attempts of these lengths, each with a call."""
    found = []
    for attempt, length in enumerate(tokens):
        seat = seats.take(attempt, "m", row)
        assert seat is not None
        seat.calls = 1
        seat.resize(length)
        found.append(seat)
    return found


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 60))
def test_new_attempts_sit_where_the_fewest_are_by_weight(weights: list[int], count: int) -> None:
    held, states = replicas(*weights), new_states()
    for attempt in range(count):
        fewest = min((len(states.of(one.backend_id).row.seats) + 1) / one.weight for one in held)
        name = sit(states, attempt, held)
        weight = next(one.weight for one in held if one.backend_id == name)
        assert len(states.of(name).row.seats) / weight == fewest


def test_an_attempt_stays_however_busy_or_saturated_its_engine_is() -> None:
    held, states = replicas(1, 1, 1), new_states()
    home = sit(states, 7, held)
    states.of(home).load = 100
    states.of(home).set_engine_load(99, 0.99)
    assert {sit(states, 7, held) for _ in range(3)} == {home}
    assert sit(states, 8, held) != home


def test_an_attempt_moves_when_its_engine_is_out_of_order_and_stays_there() -> None:
    clock = Clock()
    held, states = replicas(1, 1, 1), new_states(clock)
    home = sit(states, 7, held)
    states.of(home).row.seats[0].resize(50)
    break_down(states, home)
    new = sit(states, 7, held)
    assert new != home
    clock.now_s += 5  # it may be tried again
    assert sit(states, 7, held) == new
    assert (states.of(home).row.tokens, states.of(new).row.tokens) == (0, 50)


def test_a_joining_engine_gets_the_new_attempts_and_none_of_the_others() -> None:
    states = new_states()
    before = {attempt: sit(states, attempt, replicas(1, 1)) for attempt in range(20)}
    more = replicas(1, 1, 1)
    assert {attempt: sit(states, attempt, more) for attempt in before} == before
    assert {sit(states, attempt, more) for attempt in range(20, 30)} == {"c"}


def test_an_attempt_that_waits_moves_to_an_engine_with_room_and_to_no_other() -> None:
    held, states = replicas(1, 1, 1), new_states()
    for attempt in range(6):
        row = states.of(sit(states, attempt, held)).row
        row.set_cache_tokens(100)
        row.seats[attempt].resize(70)
    homes = [sit(states, attempt, held) for attempt in range(6)]
    assert [sit(states, attempt, held) for attempt in range(6)] == homes
    left = [attempt for attempt in range(6) if homes[attempt] != homes[0]]
    for attempt in set(range(6)) - set(left):
        states.seats.leave(attempt)
    (mover,) = [attempt for attempt in left if sit(states, attempt, held) != homes[attempt]]
    assert mover > 2  # those seated first, one at each engine, stay


def test_those_seated_first_call_as_long_as_they_fit_and_nobody_overtakes() -> None:
    row = Row(cache_tokens=100)
    first, second, third, small = seated(row, Seats(clock=Clock()), 40, 60, 50, 1)
    assert first.may_call
    assert second.may_call
    assert not third.may_call
    assert not small.may_call


def test_the_first_may_call_whatever_its_length() -> None:
    first, second = seated(Row(cache_tokens=100), Seats(clock=Clock()), 500, 1)
    assert first.may_call
    assert not second.may_call


def test_all_may_call_where_the_size_of_the_cache_is_unknown() -> None:
    assert all(seat.may_call for seat in seated(Row(), Seats(clock=Clock()), 500, 500, 500))


def test_a_conversation_that_grows_makes_the_latest_wait() -> None:
    first, second = seated(Row(cache_tokens=100), Seats(clock=Clock()), 40, 60)
    first.resize(41)
    assert first.may_call
    assert not second.may_call


async def test_waiting_attempts_go_on_in_order_when_one_ends() -> None:
    row, seats = Row(cache_tokens=100), Seats(clock=Clock())
    first, *others = seated(row, seats, 90, 60, 40, 20)
    waits = [asyncio.create_task(seat.turn()) for seat in others]
    await asyncio.sleep(0)
    assert row.waiting == 3
    seats.end(first, tokens=0)
    seats.leave(0)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*waits[:2])
    assert not waits[2].done()
    assert [seat.may_call for seat in others] == [True, True, False]
    row.wake_all()
    async with asyncio.timeout(DEADLINE_S):
        await waits[2]


async def test_a_larger_cache_lets_waiting_attempts_go_on() -> None:
    row = Row(cache_tokens=10)
    _, second = seated(row, Seats(clock=Clock()), 10, 10)
    wait = asyncio.create_task(second.turn())
    await asyncio.sleep(0)
    row.set_cache_tokens(20)
    async with asyncio.timeout(DEADLINE_S):
        await wait


async def test_a_wait_that_is_cancelled_leaves_no_trace() -> None:
    row = Row(cache_tokens=10)
    _, second = seated(row, Seats(clock=Clock()), 10, 10)
    wait = asyncio.create_task(second.turn())
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert row.waiting == 0


def test_a_seat_without_calls_for_a_minute_is_given_up_and_one_with_a_call_is_not() -> None:
    clock = Clock()
    row, seats = Row(cache_tokens=100), Seats(clock=clock)
    idle, _, calling = seated(row, seats, 30, 30, 30)
    seats.end(idle, tokens=35)
    clock.now_s += IDLE_S + 1
    seats.sweep()
    assert seats.find(0, "m") is None
    assert seats.find(2, "m") is calling
    assert row.tokens == 60
    assert calling.may_call


def test_an_attempt_that_ends_gives_up_its_seats_of_all_models() -> None:
    row, seats = Row(), Seats(clock=Clock())
    seats.take(1, "m", row)
    seats.take(1, "judge", row)
    assert len(row.seats) == 2
    seats.leave(1)
    assert not row.seats


def test_attempts_beyond_the_bound_have_no_seat() -> None:
    row, seats = Row(), Seats(clock=Clock(), max_seats=2)
    assert [seats.take(attempt, "m", row) is not None for attempt in (1, 2, 3, 1)] == [True, True, False, True]


steps = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["call", "end", "leave", "move"]), st.integers(0, 80)))


@given(steps)
def test_whoever_may_call_fits_and_was_seated_before_those_who_wait(moves: list[tuple[int, str, int]]) -> None:
    rows, seats = [Row(cache_tokens=100), Row(cache_tokens=150)], Seats(clock=Clock())
    for attempt, what, tokens in moves:
        held = seats.find(attempt, "m")
        row = rows[attempt % 2] if held is None else held.row
        if what == "leave":
            seats.leave(attempt)
            continue
        if what == "move":
            row = rows[1] if row is rows[0] else rows[0]
        seat = seats.take(attempt, "m", row)
        assert seat is not None
        seat.calls += 1
        seats.end(seat, tokens)
    for row in rows:
        assert row.tokens == sum(seat.tokens for seat in row.seats.values())
        served = [seat.may_call for seat in row.seats.values()]
        assert served == sorted(served, reverse=True)
        assert served[:1] in ([], [True])
        if sum(served) > 1:
            assert sum(seat.tokens for seat in row.seats.values() if seat.may_call) <= row.cache_tokens
