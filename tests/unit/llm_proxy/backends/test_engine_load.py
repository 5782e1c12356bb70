"""What an engine says of its load is read, or counts as not said; nothing that it says ends the probe."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.backends.health_probe import read_cache_tokens, read_load
from fulmen_llm_proxy.routing.backend_state import UNKNOWN
from fulmen_llm_proxy.routing.engines import PROFILES, Engine, LoadMetrics

METRICS = LoadMetrics(waiting="waiting", cache_use="cache", cache_tokens=re.compile(rb"^size (\d+)", re.MULTILINE))


def page(waiting: str, cache: str) -> bytes:
    return f"# TYPE waiting gauge\nwaiting {waiting}\ncache {cache}\nwaiting_total 9\n".encode()


def test_series_are_added_up_and_cache_use_is_averaged() -> None:
    text = b'waiting{engine="0"} 3\nwaiting{engine="1"} 4\ncache{engine="0"} 0.5\ncache{engine="1"} 1.0\n'
    assert read_load(text, METRICS) == (7, 0.75)


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "1e30", "-1", "", "many"])
def test_what_is_no_load_counts_as_not_said(value: str) -> None:
    assert read_load(page(value, value), METRICS) == (UNKNOWN, UNKNOWN)
    assert read_load(page(value, "0.25"), METRICS) == (UNKNOWN, 0.25)


@given(st.binary() | st.from_regex(rb"(waiting|cache)(\{[^}]*\})? [0-9eE+.Inf-]*\n", fullmatch=True))
def test_any_bytes_are_read(text: bytes) -> None:
    waiting, cache = read_load(text, METRICS)
    assert waiting >= UNKNOWN
    assert cache >= UNKNOWN


VLLM = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="400000",num_gpu_blocks="25000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="200000",num_gpu_blocks="12500"} 1.0
"""
OLD_VLLM = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="None"} 1.0\n'
SGLANG = b'sglang:max_total_num_tokens{model_name="m"} 471258.0\nsglang:num_queue_reqs 0\n'


@pytest.mark.parametrize(
    ("engine", "text", "tokens"),
    [
        (Engine.VLLM, VLLM, 600_000),
        (Engine.VLLM, OLD_VLLM, 0),
        (Engine.SGLANG, SGLANG, 471_258),
        (Engine.SGLANG, b"", 0),
    ],
)
def test_the_size_of_the_cache_is_read_as_each_engine_tells_it(engine: Engine, text: bytes, tokens: int) -> None:
    metrics = PROFILES[engine].load
    assert metrics is not None
    assert read_cache_tokens(text, metrics) == tokens
