"""Settings of the LLM proxy, read from FULMEN_LLM_PROXY_* variables."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from fulmen.ids import DEFAULT_PROJECT
from fulmen_service_kit.settings import KeyHolderSettings, settings_config


class ModelPrice(BaseModel):
    """US dollars per million tokens; cached prompt tokens cost as much as others unless it is said."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: float = Field(ge=0, le=1e6)
    output: float = Field(ge=0, le=1e6)
    cached_input: float | None = Field(default=None, ge=0, le=1e6)
    cache_write: float | None = Field(default=None, ge=0, le=1e6)


class LlmProxySettings(KeyHolderSettings):
    """What a deployment decides about the proxy."""

    model_config = settings_config("FULMEN_LLM_PROXY_")
    service_name: ClassVar[str] = "llm_proxy"

    port: int = Field(default=7201, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    http_port: int = Field(default=7200, ge=0, le=65535, description="Port of the OpenAI API; 0 takes a free one.")
    workers: int = Field(
        default=1, ge=1, le=64, description="Processes behind the two ports; one for each core that calls may use."
    )
    workers_dir: str = Field(default="", description="Set by the supervisor of several workers: their sockets' folder.")
    worker_index: int = Field(default=0, ge=0, le=63, description="Set by the supervisor of several workers.")
    store_target: str = Field(default="127.0.0.1:7101", description="The store's gRPC address, `host:port`.")
    token: SecretStr = Field(default=SecretStr(""), description="Service token for the store. Secret.")
    project: str = Field(default=DEFAULT_PROJECT, description="Project whose routes and backends are served.")
    backend_keys: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="JSON object of API keys by name; a backend's `key_name` refers to it. Secret.",
    )
    max_request_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1024, description="Largest request body; a larger one is answered 413."
    )
    request_buffer_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024,
        description="Memory for the bodies of all requests at once, at least `max_request_bytes`; beyond it new ones get 429.",
    )
    request_timeout_s: float = Field(
        default=60.0, gt=0, description="Longest time for a request's body to arrive, seconds; then 408."
    )
    write_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a caller may take nothing of an answer that waits for it, seconds; then its call ends.",
    )
    max_answer_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="Largest whole answer, and largest event of a stream, bytes."
    )
    prices: dict[str, ModelPrice] = Field(
        default_factory=dict,
        description="JSON object of US dollars per million tokens by model, or by `backend/model`; `*` stands for anything: "
        '`{"gpt-*": {"input": 2.5, "cached_input": 1.25, "output": 10}}`. A model without a price costs nothing.',
    )
    assumed_completion_tokens: int = Field(
        default=1024,
        ge=0,
        le=10**6,
        description="What a call reserves of a token limit that does not say how much it may sample, tokens.",
    )
    max_in_flight: int = Field(
        default=4096, ge=1, description="Most calls at once in this process; more are answered 429 with Retry-After."
    )
    retry_deadline_s: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="How long a call is tried again while its backend is away or refuses it, seconds; 0: never.",
    )
    answer_deadline_s: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="Longest time to a whole answer, or a stream's first event, tries and waits included; then 504.",
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60, description="Longest wait for a connection, seconds.")
    first_byte_timeout_s: float = Field(
        default=600.0, gt=0, description="Longest silence of a backend before its answer begins, seconds."
    )
    read_timeout_s: float = Field(
        default=600.0, gt=0, description="Longest silence of a backend between two pieces of a stream, seconds."
    )
    queue_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest wait for a place at a backend, seconds; then 429 with Retry-After."
    )
    max_waiting_per_backend: int = Field(
        default=1024, ge=0, description="Most calls that wait for a place at one backend; more get 429 at once."
    )
    recheck_s: float = Field(
        default=2.0,
        ge=0,
        le=300,
        description="After how long a failing backend whose health cannot be asked is tried again, seconds.",
    )
    health_interval_s: float = Field(
        default=2.0, gt=0, le=300, description="Pause between two questions for a backend's health and load, seconds."
    )
    health_timeout_s: float = Field(
        default=2.0, gt=0, le=60, description="Longest wait for a backend's answer about its health, seconds."
    )
    cache_bytes: int = Field(
        default=64 * 1024 * 1024, ge=0, description="Memory for answers of routes that are `cached`; 0 keeps none."
    )
    cache_ttl_s: float = Field(default=3600.0, gt=0, description="How long a cached answer is good, seconds.")
    capture_buffer_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=0,
        description="Memory for captures on their way; beyond it, and with the spool full, attempts' calls get 503.",
    )
    spool_dir: str = Field(
        default="",
        description="Folder for captures while the store is away; several proxies may share it. Empty: memory only.",
    )
    spool_bytes: int = Field(
        default=1024 * 1024 * 1024, ge=1024 * 1024, description="Most bytes of this process's captures on disk."
    )
    summary_keep_s: float = Field(
        default=600.0, ge=1, description="How long an attempt's summary is kept after its last call or flush, seconds."
    )
