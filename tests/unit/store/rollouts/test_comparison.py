"""The interval of a comparison covers the true difference about as often as it says."""

from __future__ import annotations

import random

from fulmen_store.rollouts.comparison import SideTask, compared


def task(*rewards: float) -> SideTask:
    made = SideTask()
    for reward in rewards:
        made.add("r", reward)
    return made


def test_the_interval_holds_the_true_difference_in_about_95_of_100_experiments() -> None:
    chance, held = random.Random(7), 0
    for _ in range(100):
        sides = [
            {bytes([n]): task(*(float(chance.random() < rate) for _ in range(4))) for n in range(60)}
            for rate in (0.4, 0.6)
        ]
        interval = compared(*sides).interval
        assert interval is not None
        held += interval[0] <= 0.2 <= interval[1]
    assert 88 <= held <= 99


def test_a_difference_of_rounding_is_none() -> None:
    found = compared({b"a": task(0.1, 0.2, 0.3)}, {b"a": task(0.3, 0.2, 0.1)})
    assert found.pairs[0].difference == 0.0
    assert found.interval is None
