"""The simulated engine keeps to its cache and its timings, on a clock that leaps."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing.trace import GROUP, agents
from tests.support import leaping_clock
from tests.support.llm_proxy.simulated_engine import (
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    Generation,
    PrefixCache,
    SimulatedEngine,
    Timings,
    block_ids,
)


def text(tokens: int, word: bytes = b"word") -> bytes:
    assert len(word) == BYTES_PER_TOKEN
    return word * tokens


async def generate(engine: SimulatedEngine, prompt: bytes, tokens: int) -> tuple[Generation, float]:
    """Returns a generation when it is complete, and how long it took on the simulation's clock, seconds."""
    loop = asyncio.get_running_loop()
    began, done = loop.time(), asyncio.Event()
    generation = Generation(prompt=prompt, tokens=tokens, on_token=lambda made: done.set() if made == tokens else None)
    engine.submit(generation)
    await done.wait()
    return generation, loop.time() - began


def simulate(timings: Timings, *prompts: tuple[bytes, int]) -> list[tuple[Generation, float]]:
    """Runs requests one after the other."""

    async def main() -> list[tuple[Generation, float]]:
        engine = SimulatedEngine(timings)
        steps = asyncio.create_task(engine.run())
        leaping_clock.leap()
        results = [await generate(engine, *prompt) for prompt in prompts]
        steps.cancel()
        return results

    return leaping_clock.run(main())


def test_a_generation_takes_as_long_as_the_timings_say() -> None:
    timings = Timings()
    [(_, took_s)] = simulate(timings, (text(80_000), 1000))
    prefill_s = 80_000 / timings.prefill_tokens_per_s
    decode_s = 999 * (timings.step_s + timings.weights_s + 80_500 * timings.cached_token_s)
    assert took_s == pytest.approx(prefill_s + decode_s, rel=0.02)


def test_a_conversation_that_goes_on_is_cached_up_to_its_last_complete_block() -> None:
    timings = Timings()
    [(first, _)] = simulate(timings, (text(1000), 100))
    [_, (second, took_s)] = simulate(timings, (text(1000), 100), (text(1000) + first.answer + text(50, b"tool"), 1))
    assert first.cached == 0
    assert second.cached == 1100 // BLOCK_TOKENS * BLOCK_TOKENS
    assert took_s < 0.02


def test_the_least_recently_used_blocks_are_evicted_and_the_end_of_a_text_before_its_beginning() -> None:
    small = Timings(blocks=100)
    one, other = text(1000, b"one "), text(1000, b"two ")
    _, _, (again, _) = simulate(small, (one, 1), (other, 1), (one, 1))
    assert again.cached == (100 - 63) * BLOCK_TOKENS


def test_new_weights_empty_the_cache_and_a_request_in_progress_computes_its_prompt_and_answer_again() -> None:
    timings = Timings()

    async def main() -> tuple[float, Generation]:
        engine = SimulatedEngine(timings)
        steps = asyncio.create_task(engine.run())
        leaping_clock.leap()
        running = asyncio.create_task(generate(engine, text(40_000), 100))
        await asyncio.sleep(40_000 / timings.prefill_tokens_per_s + 0.3)
        assert not running.done()
        engine.forget()
        _, took_s = await running
        again, _ = await generate(engine, text(40_000), 1)
        assert again.cached > 39_000
        engine.forget()
        fresh, _ = await generate(engine, text(40_000), 1)
        steps.cancel()
        assert engine.cache.reserved == 0
        return took_s, fresh

    took_s, fresh = leaping_clock.run(main())
    [(_, undisturbed_s)] = simulate(timings, (text(40_000), 100))
    assert took_s == pytest.approx(undisturbed_s + 40_000 / timings.prefill_tokens_per_s, rel=0.02)
    assert fresh.cached == 0


def test_a_request_longer_than_the_cache_is_refused() -> None:
    engine = SimulatedEngine(Timings(blocks=10))
    with pytest.raises(ValueError, match="longer than the cache"):
        engine.submit(Generation(prompt=text(150), tokens=20, on_token=lambda _: None))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.booleans()), max_size=40))
def test_the_cache_never_holds_more_than_its_size_unless_all_is_in_use(steps: list[tuple[int, int, bool]]) -> None:
    cache, held = PrefixCache(12), list[list[int]]()
    for word, blocks, ends in steps:
        ids = block_ids(text(blocks * BLOCK_TOKENS, b"%d   " % word))
        if cache.used_blocks + blocks <= cache.size:
            cache.take(ids)
            held.append(ids)
            assert cache.hit_blocks(ids) == blocks
        if ends and held:
            cache.release(held.pop(0))
        assert cache.used_blocks <= cache.size
    for ids in held:
        cache.release(ids)
    assert cache.used_blocks == 0


def test_the_trace_is_the_same_each_time_and_groups_share_their_task() -> None:
    def first(count: int) -> list[tuple[str, str, int, int]]:
        made = agents(7)
        return [
            (one.system, one.task, one.seed, len(list(one.turns()))) for one, _ in zip(made, range(count), strict=False)
        ]

    trace = first(2 * GROUP)
    assert trace == first(2 * GROUP)
    assert len({system for system, *_ in trace}) == 1
    assert [task for _, task, *_ in trace].count(trace[0][1]) == GROUP
    assert len({seed for *_, seed, _ in trace}) == 2 * GROUP
