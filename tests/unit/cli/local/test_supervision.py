"""When the supervisor starts a dead service again."""

from __future__ import annotations

from fulmen_cli.local.supervisor import RestartPolicy
from tests.support.clock import Clock


def waits(every_s: float, count: int) -> list[float]:
    clock = Clock()
    policy = RestartPolicy(clock)
    found = []
    for _ in range(count):
        found.append(policy.note_death())
        clock.now_s += every_s
    return found


def test_the_wait_doubles_with_every_death_up_to_half_a_minute_and_never_ends() -> None:
    assert waits(10, 9) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_service_that_lived_for_a_minute_is_started_at_once() -> None:
    assert waits(61, 20) == [0.5] * 20
