"""Numbers of names are not remembered for as long as a name without a use is kept."""

from __future__ import annotations

from fulmen_store.rollouts.number_cache import NAMES, TTL_S, NumberCache
from tests.support.store.manual_clock import ManualClock


def test_a_number_is_forgotten_after_an_hour_and_when_there_are_too_many() -> None:
    clock = ManualClock()
    cache = NumberCache(clock.monotonic_s)
    cache.put("first", 1)
    clock.now_s += TTL_S / 2
    cache.put("second", 2)
    assert (cache.get("first"), cache.get("second"), cache.get("third")) == (1, 2, None)
    clock.now_s += TTL_S / 2
    assert (cache.get("first"), cache.get("second")) == (None, 2)
    for number in range(NAMES):
        cache.put(number, number)
    assert (cache.get("second"), cache.get(0)) == (None, 0)
