"""Windows of a list: how many rows each has, so that a page ends when its time limit has passed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fulmen_store.rollouts.windows import FEWEST_ROWS, Pace

LIMIT_S = 0.1


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def windows(row_s: Callable[[int], float], *, most: int = 5000) -> tuple[list[int], float]:
    """Reads windows until the time is up; returns their rows, and how long they took.

    Args:
        row_s: What a row of the window with this number takes, seconds.
    """
    clock = Clock()
    pace = Pace(clock, limit_s=LIMIT_S, most=most)
    read = []
    while True:
        clock.now_s += pace.rows * row_s(len(read))
        read.append(pace.rows)
        if pace.is_over():
            return read, clock.now_s - 100.0


def test_windows_that_get_twice_as_slow_end_in_time() -> None:
    for slow_from in range(1, 10):
        _, took_s = windows(lambda number, since=slow_from: 2e-4 if number >= since else 1e-4)  # type: ignore[misc]
        assert took_s <= LIMIT_S * 1.001


def test_windows_of_one_speed_use_most_of_the_time() -> None:
    read, took_s = windows(lambda _: 2e-5)
    assert LIMIT_S * 0.9 < took_s <= LIMIT_S
    assert len(read) < 10


def test_no_window_begins_that_would_end_late() -> None:
    assert windows(lambda _: 3e-4) == ([250], pytest.approx(250 * 3e-4))
    read, _ = windows(lambda _: 2e-4)
    assert min(read) >= FEWEST_ROWS


def test_one_window_is_read_however_slow_it_is() -> None:
    assert windows(lambda _: 1.0) == ([250], 250.0)


def test_a_window_has_no_more_rows_than_allowed() -> None:
    read, _ = windows(lambda _: 1e-6, most=300)
    assert max(read) == 300
