"""What the answer cache keeps, and for how long."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.calls.answer_cache import AnswerCache, Recording
from tests.support.clock import Clock

MAX_BYTES = 64_000


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9_000), st.booleans()), max_size=80))
def test_it_never_holds_more_bytes_than_it_may_and_the_least_used_go_first(
    steps: list[tuple[int, int, bool]],
) -> None:
    cache = AnswerCache(max_bytes=MAX_BYTES, ttl_s=10, clock=Clock())
    used: list[bytes] = []
    for number, size, keep in steps:
        key = b"%d" % number
        if keep:
            before = len(cache)
            cache.keep(key, b"t", b"x" * size)
            if cache.find(key) is None:
                assert size > 7_000
                assert len(cache) == before
                continue
        elif cache.find(key) is None:
            continue
        used = [one for one in used if one != key] + [key]
        assert cache.size_bytes <= MAX_BYTES
    held = [key for key in used if cache.find(key) is not None]
    assert held == used[len(used) - len(held) :]
    assert len(held) == len(cache)


def test_an_answer_is_good_for_its_time() -> None:
    clock = Clock()
    cache = AnswerCache(max_bytes=MAX_BYTES, ttl_s=10, clock=clock)
    cache.keep(b"k", b"t", b"body")
    clock.now_s += 9.9
    assert cache.find(b"k") is not None
    clock.now_s += 0.2
    assert cache.find(b"k") is None
    cache.keep(b"k", b"t", b"body", ttl_s=3)
    clock.now_s += 3.1
    assert cache.find(b"k") is None
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_only_whole_answers_are_kept() -> None:
    cache = AnswerCache(max_bytes=MAX_BYTES, ttl_s=10, clock=Clock())
    keep = partial(cache.keep, b"k", b"t")
    for broken in (Collected(), Collected(complete=True, malformed=True), Collected(complete=True, error=True)):
        recording = Recording(keep, cache.max_answer_bytes)
        recording.add(b"part")
        recording.end(broken)
        assert cache.find(b"k") is None
    large = Recording(keep, cache.max_answer_bytes)
    for _ in range(10):
        large.add(b"x" * 1000)
    large.end(Collected(complete=True))
    assert cache.find(b"k") is None
    recording = Recording(keep, cache.max_answer_bytes)
    recording.add(b"one")
    recording.add(b"two")
    recording.end(Collected(complete=True))
    found = cache.find(b"k")
    assert found is not None
    assert found.body == b"onetwo"


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache = AnswerCache(max_bytes=0, ttl_s=10, clock=Clock())
    cache.keep(b"k", b"t", b"")
    assert cache.find(b"k") is None
