"""Profiles of the inference engines that backends run.

The field `engine` of a backend names its engine. The profile says in which APIs a stream carries token ids, where
health is probed, and which of the engine's Prometheus metrics report its load. Token ids are requested from all
engines in the same way, by `return_token_ids` and `logprobs` in the request. They differ in where they put them, and
the readers of `apis` accept either place: vLLM puts `prompt_token_ids` beside the choices of a chat completion and
within each choice of a completion; SGLang puts it within each choice of both.

Paths of health and metrics are relative to the root of the server (`root_of`), not to the API's version. Samples of
several series (one per data-parallel rank) are summed, except `cache_use`, which is averaged.

Sources: vLLM 0.32 (`vllm/entrypoints/openai`, `vllm/v1/metrics/loggers.py`), run by the tests;
SGLang's main branch of 2026 (`python/sglang/srt/entrypoints/openai/{protocol,serving_chat,
serving_completions}.py` and its metrics collector), read, not run: it needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from fulmen_llm_proxy.apis.api import ApiName


class Engine(StrEnum):
    """Inference engine of a backend."""

    UNKNOWN = "unknown"
    VLLM = "vllm"
    SGLANG = "sglang"
    FULMEN = "fulmen"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Names of an engine's Prometheus metrics.

    Attributes:
        waiting: gauge of requests waiting inside the engine.
        cache_use: gauge of the share of the key-value cache in use, 0 to 1.
        cache_tokens: matches the size of the key-value cache, tokens, as its group.
    """

    waiting: str
    cache_use: str
    cache_tokens: re.Pattern[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """The differences between engines.

    Attributes:
        ids_in_streams: APIs whose streams carry token ids. A captured call by another API is sent without `stream`, and
            the caller gets the complete answer as a stream.
        health_path: path that answers 200 while the server accepts calls; empty if it has none.
        metrics_path: path of the engine's metrics; empty if it has none.
        load: metrics that report its load; None if it reports none.
    """

    ids_in_streams: frozenset[ApiName]
    health_path: str = ""
    metrics_path: str = ""
    load: LoadMetrics | None = None


_BOTH = frozenset({ApiName.CHAT, ApiName.COMPLETIONS})

PROFILES: Mapping[Engine, EngineProfile] = {
    Engine.UNKNOWN: EngineProfile(ids_in_streams=_BOTH),
    Engine.VLLM: EngineProfile(
        ids_in_streams=_BOTH,
        health_path="/health",
        metrics_path="/metrics",
        load=LoadMetrics(
            waiting="vllm:num_requests_waiting",
            cache_use="vllm:kv_cache_usage_perc",
            cache_tokens=re.compile(rb'^vllm:cache_config_info\{[^\n]*kv_cache_size_tokens="(\d{1,12})"', re.MULTILINE),
        ),
    ),
    # A streamed chat completion that asks for token ids is refused with 400. Metrics need `--enable-metrics`.
    Engine.SGLANG: EngineProfile(
        ids_in_streams=frozenset({ApiName.COMPLETIONS}),
        health_path="/health",
        metrics_path="/metrics",
        load=LoadMetrics(
            waiting="sglang:num_queue_reqs",
            cache_use="sglang:token_usage",
            cache_tokens=re.compile(rb"^sglang:max_total_num_tokens(?:\{[^\n]*\})? (\d{1,12})\b", re.MULTILINE),
        ),
    ),
    Engine.FULMEN: EngineProfile(ids_in_streams=_BOTH, health_path="/health"),
}


def root_of(base_url: str) -> str:
    """Returns the root URL of a server, such as `http://10.0.0.7:8000`, from the base URL of its API."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}"
