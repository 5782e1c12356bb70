"""How many attempts run at once, over any history of ends, loads and times."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fulmen_runner.slots.control import (
    DECREASE_FACTOR,
    DECREASE_PAUSE_S,
    GROWTH_INTERVAL_S,
    GROWTH_PAUSE_S,
    SlotChange,
    SlotControl,
    SlotPolicy,
    SlotReason,
)
from fulmen_runner.slots.load import Load

POLICY = SlotPolicy(min_slots=2, max_slots=128, memory_share=0.8)
FIRST = 16


def write_load(*, memory: float = 0.1, cpu: float = 0.2) -> Load:
    """Makes a load of a machine of 1000 bytes."""
    return Load(cpu=cpu, memory_bytes=int(memory * 1000), memory_limit_bytes=1000)


def control(*, limit: int = FIRST, automatic: bool = True) -> SlotControl:
    """Makes a control."""
    return SlotControl(policy=POLICY, limit=limit, automatic=automatic)


def end(
    slots: SlotControl,
    now_s: float,
    *,
    took_s: float = 1.0,
    well: bool = True,
    throttled: int = 0,
    used: int | None = None,
) -> None:
    """Ends one attempt while all slots are in use, or so many."""
    in_use = slots.limit if used is None else used
    slots.ended(started_s=now_s - took_s, now_s=now_s, good=well, throttled=throttled, in_use=in_use)


ticks = st.lists(
    st.tuples(
        st.floats(0.5, 8.0),  # seconds until the next look
        st.integers(0, 150),  # slots in use
        st.floats(0.0, 1.0),  # share of memory
        st.floats(0.0, 1.0),  # share of processors
        st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans(), st.sampled_from((0, 0, 0, 3))), max_size=4),
    ),
    max_size=40,
)


@given(ticks)
def test_it_stays_within_its_limits_moves_by_one_step_or_one_share_and_rests_in_between(history: list) -> None:
    slots, now_s = control(), 0.0
    changes: list[SlotChange] = []
    for wait_s, in_use, memory, cpu, ends in history:
        now_s += wait_s
        for took_s, well, throttled in ends:
            end(slots, now_s, took_s=took_s, well=well, throttled=throttled, used=in_use)
        before = slots.limit
        change = slots.decide(now_s=now_s, in_use=in_use, load=write_load(memory=memory, cpu=cpu))
        assert POLICY.min_slots <= slots.limit <= POLICY.max_slots
        if change is None:
            assert slots.limit == before
            continue
        assert (change.before, change.after) == (before, slots.limit)
        if change.reason is SlotReason.BUSY:
            assert before < slots.limit <= before + POLICY.step
            assert in_use >= before, "it grew although slots were free"
            assert memory <= POLICY.memory_share
        else:
            assert slots.limit <= max(POLICY.min_slots, DECREASE_FACTOR * before)
        for earlier in changes:
            is_growth, grew = change.reason is SlotReason.BUSY, earlier.reason is SlotReason.BUSY
            if is_growth:
                assert now_s - earlier.at_s >= (GROWTH_INTERVAL_S if grew else GROWTH_PAUSE_S)
            elif not grew:
                assert now_s - earlier.at_s >= DECREASE_PAUSE_S
        changes.append(change)
    assert sum(slots.change_counts.values()) == len(changes)


@given(ticks)
def test_a_fixed_number_never_moves(history: list) -> None:
    slots, now_s = control(limit=300, automatic=False), 0.0
    for wait_s, in_use, memory, cpu, ends in history:
        now_s += wait_s
        for took_s, well, throttled in ends:
            end(slots, now_s, took_s=took_s, well=well, throttled=throttled)
        assert slots.decide(now_s=now_s, in_use=in_use, load=write_load(memory=memory, cpu=cpu)) is None
    assert slots.limit == 300


@given(st.integers(4, 120), st.integers(2, 128))
def test_it_finds_about_as_many_as_a_backend_bears_and_stays_there(capacity: int, first: int) -> None:
    slots, seen = control(limit=first), []
    for second in range(1, 1200):
        used = slots.limit
        end(slots, float(second), throttled=max(0, used - capacity), used=used)
        slots.decide(now_s=float(second), in_use=used, load=write_load())
        seen.append(slots.limit)
    settled = seen[len(seen) // 2 :]
    assert max(settled) <= capacity + POLICY.step
    assert min(settled) >= max(POLICY.min_slots, int(capacity * DECREASE_FACTOR) - POLICY.step)


def test_one_burst_of_refused_calls_shrinks_it_once() -> None:
    slots = control()
    for second in range(1, 40):
        # All of these began before the first of them was refused.
        end(slots, float(second), took_s=float(second), throttled=2)
        slots.decide(now_s=float(second), in_use=FIRST, load=write_load())
    assert slots.change_counts[SlotReason.THROTTLED] == 1
    assert slots.last_change is not None
    assert slots.change_counts[SlotReason.BUSY] > 0, "it grows again once it has rested"


def test_unused_slots_do_not_count_when_it_shrinks() -> None:
    slots = control(limit=100)
    end(slots, 1.0, throttled=1, used=10)
    slots.decide(now_s=1.0, in_use=10, load=write_load())
    assert slots.limit == 7


def test_memory_shrinks_it_again_and_again_down_to_the_floor() -> None:
    slots = control(limit=100)
    for second in range(1, 400):
        slots.decide(now_s=float(second), in_use=slots.limit, load=write_load(memory=0.9))
    assert slots.limit == POLICY.min_slots
    assert slots.last_change is not None
    assert slots.last_change.reason is SlotReason.MEMORY


def test_slower_attempts_shrink_it_only_where_the_processors_are_busy() -> None:
    for cpu, reasons in ((0.5, set()), (1.0, {SlotReason.SLOWER})):
        slots = control()
        for second in range(1, 60):
            took_s = 1.0 if second < 30 else 3.0
            end(slots, float(second), took_s=took_s, used=1)
            slots.decide(now_s=float(second), in_use=1, load=write_load(cpu=cpu))
        assert {reason for reason, count in slots.change_counts.items() if count} == reasons


def test_it_does_not_grow_while_attempts_end_badly_or_none_ends() -> None:
    slots = control()
    for second in range(1, 30):
        slots.decide(now_s=float(second), in_use=FIRST, load=write_load())
    for second in range(30, 60):
        end(slots, float(second), well=second % 2 == 1)
        slots.decide(now_s=float(second), in_use=FIRST, load=write_load())
    assert slots.limit == FIRST


def test_a_number_set_by_hand_stays_until_it_is_automatic_again() -> None:
    slots = control()
    slots.fix(1000)
    end(slots, 10.0, throttled=5)
    assert slots.decide(now_s=10.0, in_use=FIRST, load=write_load(memory=1.0)) is None
    assert slots.limit == 1000
    slots.automate()
    assert slots.limit == POLICY.max_slots, "the nearest number that it may decide"
    assert slots.decide(now_s=20.0, in_use=POLICY.max_slots, load=write_load(memory=1.0)) is not None


def test_a_fault_that_is_over_is_forgotten_in_minutes() -> None:
    slots = control()
    for _ in range(200):
        end(slots, 1.0, well=False)
    for second in range(1, 200):
        end(slots, float(second))
        slots.decide(now_s=float(second), in_use=FIRST, load=write_load())
    assert slots.limit > FIRST
