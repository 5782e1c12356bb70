"""How many forged keys an address may show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fulmen_service_kit.security.failed_keys import FailedKeys


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Returns the time."""
        return self.now_s


def test_an_address_may_fail_so_often_at_once_and_then_so_often_a_minute() -> None:
    clock = Clock()
    keys = FailedKeys(per_minute=60, clock=clock)
    assert [keys.failed("a") for _ in range(60)] == [0.0] * 60
    assert 0 < keys.failed("a") <= 1
    assert keys.failed("b") == 0
    clock.now_s = 1.5
    assert keys.failed("a") == 0
    assert keys.failed("a") > 0


def test_without_a_limit_no_address_waits() -> None:
    keys = FailedKeys(per_minute=0, clock=Clock())
    assert {keys.failed("a") for _ in range(1000)} == {0.0}


@given(
    per_minute=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 30)), max_size=200),
)
def test_no_address_fails_more_often_than_allowed(per_minute: int, steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    keys = FailedKeys(per_minute=per_minute, clock=clock)
    allowed: dict[int, int] = {}
    for address, pause_s in steps:
        clock.now_s += pause_s
        wait_s = keys.failed(str(address))
        assert wait_s <= 60 / per_minute
        allowed[address] = allowed.get(address, 0) + (wait_s == 0)
        assert allowed[address] <= per_minute * (1 + clock.now_s / 60) + 1e-6


def test_the_table_is_bounded_and_forgets_who_failed_longest_ago() -> None:
    keys = FailedKeys(per_minute=1, clock=Clock(), max_addresses=2)
    assert [keys.failed(address) for address in "abc"] == [0, 0, 0]
    assert keys.failed("b") > 0
    assert keys.failed("a") == 0
    assert len(keys._left) == 2
