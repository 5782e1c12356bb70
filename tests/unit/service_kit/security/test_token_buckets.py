"""How often a name may do something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fulmen_service_kit.security.token_buckets import TokenBuckets


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Returns the time."""
        return self.now_s


def test_a_name_may_take_so_many_at_once_and_then_so_many_a_minute() -> None:
    clock = Clock()
    buckets = TokenBuckets.per_minute(60, clock)
    assert [buckets.take("a") for _ in range(60)] == [0.0] * 60
    assert 0 < buckets.take("a") <= 1
    assert buckets.take("b") == 0
    clock.now_s = 1.5
    assert buckets.take("a") == 0
    assert buckets.take("a") > 0


def test_without_a_limit_no_name_waits() -> None:
    buckets = TokenBuckets.per_minute(0, Clock())
    assert {buckets.take("a") for _ in range(1000)} == {0.0}


@given(
    per_minute=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 30)), max_size=200),
)
def test_no_name_takes_more_than_allowed(per_minute: int, steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    buckets = TokenBuckets.per_minute(per_minute, clock)
    allowed: dict[int, int] = {}
    for name, pause_s in steps:
        clock.now_s += pause_s
        wait_s = buckets.take(str(name))
        assert wait_s <= 60 / per_minute
        allowed[name] = allowed.get(name, 0) + (wait_s == 0)
        assert allowed[name] <= per_minute * (1 + clock.now_s / 60) + 1e-6


def test_the_table_is_bounded_and_forgets_who_took_longest_ago() -> None:
    buckets = TokenBuckets(per_s=1 / 60, burst=1, clock=Clock(), max_names=2)
    assert [buckets.take(name) for name in "abc"] == [0, 0, 0]
    assert buckets.take("b") > 0
    assert buckets.take("a") == 0
    assert len(buckets._left) == 2
