"""What calls cost by pattern, and usage that is told exactly once whatever happens to the store."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.apis.usage import BYTES_PER_TOKEN, MAX_TOKENS, TokenCounts, tokens_to_reserve
from fulmen_llm_proxy.limits.prices import Price, PriceTable
from fulmen_llm_proxy.limits.usage_book import BATCH_KEYS, UsageBook, UsageCounts
from fulmen_llm_proxy.limits.usage_sync import StoreClock
from fulmen_llm_proxy.settings import LlmProxySettings, ModelPrice

KEY = ("projects/p", "a", "m", "backends/b")


def price(output: float) -> Price:
    return Price(input=1.0, cached_input=0.5, cache_write=1.25, output=output)


def test_each_kind_of_token_has_its_price() -> None:
    counts = TokenCounts(prompt=1_000_000, cached=400_000, cache_written=100_000, completion=10_000)
    assert price(8.0).cost_micros(counts) == 500_000 + 200_000 + 125_000 + 80_000
    assert price(8.0).cost_micros(TokenCounts()) == 0
    # A backend that counts more cached tokens than the prompt has.
    assert price(8.0).cost_micros(TokenCounts(prompt=10, cached=50, cache_written=50)) == 5


def test_the_most_precise_pattern_counts() -> None:
    table = PriceTable(
        {"*": price(1), "gpt-*": price(2), "azure/gpt-*": price(3), "gpt-4o": price(4), "azure/gpt-4o": price(5)}
    )
    found = {
        each: (table.of(*each) or price(0)).output
        for each in [
            ("azure", "gpt-4o"),
            ("openai", "gpt-4o"),
            ("azure", "gpt-5"),
            ("openai", "gpt-5"),
            ("openai", "tiny"),
        ]
    }
    assert list(found.values()) == [5, 4, 3, 2, 1]
    assert PriceTable({"gpt-*": price(2)}).of("b", "tiny") is None
    assert PriceTable({}).cost_micros("b", "tiny", TokenCounts(prompt=5)) == 0


@pytest.mark.parametrize("wrong", [{"input": -1, "output": 0}, {"input": 1}, {"input": 1, "output": 1, "inptu": 1}])
def test_a_price_that_cannot_be_meant_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ModelPrice(**wrong)


def test_a_batch_is_told_again_as_it_was_until_the_store_has_it() -> None:
    book = UsageBook()
    assert book.batch() is None
    book.count(KEY, UsageCounts(requests=1))
    first = book.batch()
    book.count(KEY, UsageCounts(requests=1))
    assert book.batch() is first
    assert first is not None
    assert first.counts[KEY].requests == 1
    book.acknowledge()
    second = book.batch()
    assert second is not None
    assert second.sequence > first.sequence
    assert not book.is_empty
    book.acknowledge()
    assert book.is_empty


def test_memory_is_bounded_by_keys_and_no_token_is_lost() -> None:
    book = UsageBook(max_keys=10)
    for number in range(1000):
        book.count(("projects/p", f"a{number}", "m", "b"), UsageCounts(requests=1, prompt=5))
    assert len(book) == 11
    assert book.without_attempt == 990
    batch = book.batch()
    assert batch is not None
    assert sum(counts.prompt for counts in batch.counts.values()) == 5000
    assert book.total.prompt == 5000


def test_a_long_absence_is_told_in_batches() -> None:
    book = UsageBook()
    for number in range(BATCH_KEYS + 5):
        book.count(("projects/p", f"a{number}", "m", "b"), UsageCounts(requests=1))
    sizes = []
    while (batch := book.batch()) is not None:
        sizes.append(len(batch.counts))
        book.acknowledge()
    assert sizes == [BATCH_KEYS, 5]


@given(costs=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3), st.booleans()), max_size=60))
def test_costs_are_told_in_whole_millionths_and_nothing_of_them_is_lost(costs: list[tuple[str, float, bool]]) -> None:
    book, told = UsageBook(), 0.0
    for attempt, cost, tell in costs:
        book.count(("projects/p", attempt, "m", "b"), UsageCounts(requests=1, cost_micros=cost))
        batch = book.batch() if tell else None
        if batch is not None:
            assert all(float(counts.cost_micros).is_integer() for counts in batch.counts.values())
            told += sum(counts.cost_micros for counts in batch.counts.values())
            book.acknowledge()
    last = book.batch()
    told += sum(counts.cost_micros for counts in last.counts.values()) if last else 0
    total = math.fsum(cost for _, cost, _ in costs)
    assert total - 1.000001 <= told <= total + 1e-6


def test_the_clock_follows_the_store_and_tells_when_it_was_set_back() -> None:
    mono = 100.0
    clock = StoreClock(wall=lambda: 5000.0, monotonic=lambda: mono)
    assert clock.now() == 5000
    assert not clock.sync(5000.1, sent=100.0, received=100.0)
    assert clock.now() == 5000
    assert not clock.sync(6000.0, sent=99.0, received=101.0)
    assert clock.now() == 6000
    assert clock.sync(4000.0, sent=100.0, received=100.0)
    assert clock.now() == 4000


@pytest.mark.parametrize(("asked", "reserved"), [(-5, 0), (7, 7), (10**18, MAX_TOKENS), (10**30, MAX_TOKENS)])
def test_what_a_call_reserves_can_be_told_whatever_it_asks_for(asked: int, reserved: int) -> None:
    request = BY_PATH["/v1/chat/completions"].parse(b'{"model": "m", "messages": [], "max_tokens": %d}' % asked)
    prompt = sum(map(len, request.fields.values())) // BYTES_PER_TOKEN
    assert tokens_to_reserve(request, assumed_completion=0) == prompt + reserved


def test_the_cost_of_a_budget_is_told_once_in_whole_micros_and_counts_until_the_store_has_it() -> None:
    book, paid = UsageBook(), ("projects/p", "project", 0)
    for cost in (1.5, 0.75):
        book.count(KEY, UsageCounts(requests=1, cost_micros=cost), [paid])
    assert book.unreported_micros(paid) == 2.25
    first = book.batch()
    assert first is not None
    assert first.spend == {paid: 2}
    book.count(KEY, UsageCounts(requests=1, cost_micros=0.75), [paid])
    assert book.batch() is first
    assert book.unreported_micros(paid) == 3.0
    book.acknowledge()
    assert book.unreported_micros(paid) == 1.0
    second = book.batch()
    assert second is not None
    assert second.spend == {paid: 1}
    assert book.unreported_micros(("projects/p", "run/r", 0)) == 0


def test_prices_of_a_file_are_added_to_those_of_the_setting_which_win(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"gpt-*": {"input": 1, "output": 2}, "tiny": {"input": 3, "output": 4}}')
    own = {"tiny": {"input": 5, "output": 6}}
    prices = LlmProxySettings(dev_mode=True, price_file=str(file), prices=own).resolved_prices()
    assert {name: (each.input, each.output) for name, each in prices.items()} == {"gpt-*": (1, 2), "tiny": (5, 6)}


@pytest.mark.parametrize(
    ("text", "problem"), [("[", "price_file: .*JSON"), ('{"a": {"input": 1}, "b": 2}', r"a\.output: .*; b: ")]
)
def test_a_price_file_that_is_not_valid_is_told_with_every_problem(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(text)
    with pytest.raises(ValidationError, match=problem):
        LlmProxySettings(dev_mode=True, price_file=str(file))
    with pytest.raises(ValidationError, match="cannot be read"):
        LlmProxySettings(dev_mode=True, price_file=str(tmp_path / "none.json"))
