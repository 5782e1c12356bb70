"""How many runners a local stack has: what may be asked for, and how gently it changes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fulmen_cli.local.fleet import (
    SHRINK_AFTER_S,
    SHRINK_PAUSE_S,
    START_PAUSE_S,
    FleetPace,
    FleetRange,
    fleet_range,
    max_runners_here,
)

LIMITS = FleetRange(minimum=1, maximum=8)


def test_a_range_is_a_number_auto_or_auto_with_limits() -> None:
    assert fleet_range("3") == FleetRange(minimum=3, maximum=3)
    assert fleet_range("0") == FleetRange(minimum=0, maximum=0)
    assert fleet_range("auto:2-8") == FleetRange(minimum=2, maximum=8)
    assert fleet_range("auto") == FleetRange(minimum=1, maximum=max_runners_here())
    assert 1 <= max_runners_here() <= 64


@pytest.mark.parametrize(
    "text", ["", "65", "-1", "auto:", "auto:0-3", "auto:4-3", "auto:1-65", "auto:1", "many", "1-3"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        fleet_range(text)


@given(st.lists(st.tuples(st.floats(0.5, 20.0), st.integers(0, 30)), max_size=60))
def test_it_stays_in_its_range_doubles_at_most_and_drains_only_what_was_not_wanted_for_a_while(
    history: list[tuple[float, int]],
) -> None:
    pace, now_s, count = FleetPace(LIMITS), 0.0, 1
    seen: list[tuple[float, int]] = []
    starts: list[float] = []
    drains: list[float] = []
    for wait_s, wanted in history:
        now_s += wait_s
        seen.append((now_s, wanted))
        change = pace.decide(now_s=now_s, wanted=wanted, count=count)
        if change > 0:
            assert change <= count
            assert count + change <= wanted
            assert not starts or now_s - starts[-1] >= START_PAUSE_S
            starts.append(now_s)
        elif change < 0:
            assert change == -1
            assert all(each < count for at_s, each in seen if at_s >= now_s - SHRINK_AFTER_S)
            assert not drains or now_s - drains[-1] >= SHRINK_PAUSE_S
            assert not starts or now_s - starts[-1] >= SHRINK_AFTER_S, "it drains what it has just started"
            drains.append(now_s)
        count += change
        assert LIMITS.minimum <= count <= LIMITS.maximum


def test_it_follows_the_work_up_and_down() -> None:
    pace, count, seen = FleetPace(LIMITS), 1, []
    for second in range(0, 240, 2):
        wanted = 8 if second < 40 else 1
        count += pace.decide(now_s=float(second), wanted=wanted, count=count)
        seen.append(count)
    assert max(seen[:20]) == 8
    assert seen[-1] == 1


def test_nothing_is_drained_before_the_work_was_watched_for_a_while() -> None:
    pace = FleetPace(LIMITS)
    assert pace.decide(now_s=0.0, wanted=1, count=3) == 0
    assert pace.decide(now_s=SHRINK_AFTER_S - 1, wanted=1, count=3) == 0
    assert pace.decide(now_s=SHRINK_AFTER_S, wanted=1, count=3) == -1
    assert pace.decide(now_s=SHRINK_AFTER_S + SHRINK_PAUSE_S - 1, wanted=1, count=2) == 0
    assert pace.decide(now_s=SHRINK_AFTER_S + SHRINK_PAUSE_S, wanted=1, count=2) == -1
