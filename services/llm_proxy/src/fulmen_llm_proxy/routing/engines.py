"""What the proxy knows of the engines that model servers run.

An engine is named by the field `engine` of a backend. Its profile says in which APIs a stream
carries token ids, where health is asked, and how load is read from its own Prometheus metrics. All
engines are asked for token ids in the same way: `return_token_ids` and `logprobs` in the request.
Where they put them differs a little, and the readers of `apis` take either place: vLLM puts
`prompt_token_ids` beside the choices of a chat completion, and within each choice of a completion;
SGLang puts it within each choice of both.

Whoever asks for health or load: paths are below the root of the server (`root_of`), not below the
API's version. A sample of a metric counts if its name is the profile's; samples of several series
(one for each data-parallel rank) are to be added up, `cache_use` to be averaged.

Sources: vLLM 0.32 (`vllm/entrypoints/openai`, `vllm/v1/metrics/loggers.py`), run by the tests;
SGLang's main branch of 2026 (`python/sglang/srt/entrypoints/openai/{protocol,serving_chat,
serving_completions}.py` and its metrics collector), read, not run: it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from fulmen_llm_proxy.apis.api import ApiName


class Engine(StrEnum):
    """What runs at a backend."""

    UNKNOWN = "unknown"
    VLLM = "vllm"
    SGLANG = "sglang"
    FULMEN = "fulmen"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Names of an engine's own metrics, in the text format of Prometheus.

    Attributes:
        waiting: requests that wait within the engine; a gauge.
        cache_use: share of the key-value cache in use, 0 to 1; a gauge.
    """

    waiting: str
    cache_use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """What is different from engine to engine.

    Attributes:
        ids_in_streams: the APIs whose streams carry token ids. A captured call by another is sent
            without `stream`, and the caller gets the whole answer as a stream.
        health_path: answers 200 while the server can take calls; empty: it has none.
        metrics_path: where `load` is read; empty: it has none.
        load: None if it reports no load.
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
        ),
    ),
    Engine.FULMEN: EngineProfile(ids_in_streams=_BOTH, health_path="/health"),
}


def root_of(base_url: str) -> str:
    """Returns the root of a server, such as `http://10.0.0.7:8000`, from its API's address."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}"
