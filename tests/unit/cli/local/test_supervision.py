"""When the supervisor starts a dead service again, and when it gives up."""

from __future__ import annotations

from fulmen_cli.local.supervisor import RestartPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_doubles_with_every_death_and_the_fifth_within_a_minute_is_the_last() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    waits = []
    for _ in range(5):
        waits.append(policy.note_death())
        clock.now += 10

    assert waits == [0.5, 1.0, 2.0, 4.0, None]


def test_deaths_longer_than_a_minute_ago_are_forgotten() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    waits = []
    for _ in range(20):
        waits.append(policy.note_death())
        clock.now += 61

    assert waits == [0.5] * 20
