"""Settings of the LLM proxy, read from FULMEN_LLM_PROXY_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, TypeAdapter, ValidationError, model_validator

from fulmen.ids import DEFAULT_PROJECT
from fulmen.secret_names import VENDORS
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.limits.prices import Price
from fulmen_service_kit.security.secret import SigningKeys, problem_of, split_keys
from fulmen_service_kit.settings import ServiceSettings, settings_config


class ModelPrice(BaseModel):
    """US dollars per million tokens; cached prompt tokens cost the same as others unless set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: float = Field(ge=0, le=1e6)
    output: float = Field(ge=0, le=1e6)
    cached_input: float | None = Field(default=None, ge=0, le=1e6)
    cache_write: float | None = Field(default=None, ge=0, le=1e6)

    def resolved(self) -> Price:
        """Returns the price with its defaults filled in."""
        return Price(
            input=self.input,
            cached_input=self.input if self.cached_input is None else self.cached_input,
            cache_write=self.input if self.cache_write is None else self.cache_write,
            output=self.output,
        )


class BackendKey(BaseModel):
    """API key of backends, and the hosts that it may be sent to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: SecretStr
    hosts: tuple[str, ...] = Field(min_length=1)


_ORIGIN = re.compile(r"\*|https?://[^\s/?#,@]+")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


class PassedPath(BaseModel):
    """Where the requests of a path are passed on to, and for which projects; without any, for all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field(min_length=1, max_length=63)
    projects: tuple[str, ...] = ()


class GuardSettings(BaseModel):
    """A guard: a webhook or a function that judges calls."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    url: str = Field(default="", pattern=r"^(https?://[^\s]+)?$")
    entry_point: str = ""
    phases: tuple[Literal["before", "after"], ...] = Field(default=("before",), min_length=1)
    deadline_s: float = Field(default=1.0, gt=0, le=60)
    on_failure: Literal["refuse", "allow"] = "refuse"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.url) == bool(self.entry_point):
            raise ValueError(f"guard {self.name} needs either a url or an entry_point")
        return self


_PASSED_PATH = re.compile(r"/v1(/[a-z0-9_-]{1,64}){1,4}")
_OWN_PATHS = ("/v1/models", "/v1/responses", "/v1/effects")
"""Paths that the proxy serves with all that is below them."""


_BACKEND_KEYS = TypeAdapter(dict[str, BackendKey], config=ConfigDict(hide_input_in_errors=True))


_PRICES = TypeAdapter(dict[str, ModelPrice])
_MAX_PRICE_BYTES = 16 * 1024 * 1024


def _read_prices(path: str) -> dict[str, ModelPrice]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_PRICE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"price_file: {path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_PRICE_BYTES:
        raise ValueError(f"price_file: {path} has more than {_MAX_PRICE_BYTES} bytes")
    try:
        return _PRICES.validate_json(content)
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:_MAX_PROBLEMS]
        )
        raise ValueError(f"price_file: {path}: {found}") from None


_MAX_PROBLEMS = 20


class LlmProxySettings(ServiceSettings):
    """The settings of a proxy."""

    model_config = settings_config("FULMEN_LLM_PROXY_")
    service_name: ClassVar[str] = "llm_proxy"
    _filed_prices: dict[str, ModelPrice] = PrivateAttr(default_factory=dict)

    port: int = Field(default=7201, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    http_port: int = Field(
        default=7200, ge=0, le=65535, description="HTTP port of the model APIs; 0 selects a free one."
    )
    metrics_port: int = Field(
        default=7202, ge=0, le=65535, description="HTTP port of /metrics, for the operator; 0 selects a free one."
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="Number of processes behind the ports; one per core to use."
    )
    workers_dir: str = Field(default="", description="Folder of the workers' sockets. Set by the supervisor.")
    worker_index: int = Field(default=0, ge=0, le=63, description="Index of this worker. Set by the supervisor.")
    store_target: str = Field(default="127.0.0.1:7101", description="gRPC address of the store, `host:port`.")
    token: SecretStr = Field(default=SecretStr(""), description="Service token for the store. Secret.")
    attempt_key_secret: SecretStr = Field(
        default=SecretStr(""),
        description="Secrets of attempt keys, one per line, as `fulmen token --attempt-key-secret` prints them for the "
        "store's signing keys. Secret.",
    )
    project: str = Field(default=DEFAULT_PROJECT, description="Project whose routes and backends are served.")
    backend_keys: dict[str, BackendKey] = Field(
        default_factory=dict,
        description="API keys of backends, a JSON object by name; a backend's `key_name` refers to it. Each is sent to its"
        ' hosts only: `{"openai": {"key": "sk-...", "hosts": ["api.openai.com"]}}`; a host may have a port and wildcards,'
        " such as `*.example.com:8000`. Secret.",
    )
    project_calls_per_s: float = Field(
        default=5000.0,
        ge=0,
        le=1e9,
        description="Calls per second of each project in this process; 64 KiB count as one call. More get 429 or "
        "RESOURCE_EXHAUSTED. Tokens for all projects have no limit. 0: none.",
    )
    project_burst: float = Field(
        default=10_000.0, ge=1, le=1e9, description="Burst of calls of a project above `project_calls_per_s`."
    )
    project_max_calls: int = Field(
        default=3072,
        ge=0,
        le=1_000_000,
        description="Calls of a project at the same time in this process, less than `max_in_flight`. 0: no limit.",
    )
    project_max_routes: int = Field(
        default=64,
        ge=1,
        le=1_000_000,
        description="Maximum number of model names of a project, which its training runs use: each adapter of a policy is one. A run that needs"
        " more fails with RESOURCE_EXHAUSTED. Routes of the operator do not count.",
    )
    vendors: str = Field(
        default="",
        max_length=256,
        description="Vendors whose keys are taken from their usual variables, separated by commas: `openai` is the key"
        " OPENAI_API_KEY, sent to api.openai.com only. A key of the same name in `backend_keys` or in the store takes precedence. Known: "
        + ", ".join(VENDORS)
        + ".",
    )
    litellm_python: str = Field(
        default="",
        max_length=4096,
        description="Python of an environment that has LiteLLM, as `tools/litellm_env.sh` makes it; required for "
        "backends of the dialect `litellm`, each of which is called from a process of its own.",
    )
    litellm_processes: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Maximum number of vendors' addresses that are called through LiteLLM at the same time; each "
        "needs a process of about 220 MB, in every worker.",
    )
    pass_on: dict[str, PassedPath] = Field(
        default_factory=dict,
        description="Paths that the proxy does not serve itself, and the backend to which it forwards their requests "
        "unread, a JSON object: "
        '`{"/v1/files": {"backend": "openai"}, "/v1/audio": {"backend": "openai", "projects": '
        '["projects/team-a"]}}`; paths below a path are included. Empty: other paths get 404.',
    )
    guards: list[GuardSettings] = Field(
        default_factory=list,
        max_length=16,
        description='Guards that check calls, a JSON list, called in order: `[{"name": "pii", "url": '
        '"http://guard:8080/check", "phases": ["before", "after"], "deadline_s": 2, "on_failure": "refuse"}]`; '
        "instead of `url`, `entry_point` names one of an installed package.",
    )
    max_request_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1024, description="Largest request body, bytes; a larger one gets 413."
    )
    request_buffer_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024,
        description="Memory for all request bodies, bytes, at least `max_request_bytes`; beyond it, requests get 429.",
    )
    request_timeout_s: float = Field(
        default=60.0, gt=0, description="Timeout for a request's body to arrive, seconds; then 408."
    )
    write_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Timeout for a caller that does not read its answer, seconds; then its call ends.",
    )
    max_answer_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="Largest answer, and largest event of a stream, bytes."
    )
    cors_origins: str = Field(
        default="",
        max_length=4096,
        description="Origins whose web pages may call the model APIs from a browser, separated by commas, such as "
        "`https://app.example.com`; `*` is any. Empty: none.",
    )
    prices: dict[str, ModelPrice] = Field(
        default_factory=dict,
        description="Prices in US dollars per million tokens, a JSON object by model or `backend/model`; `*` is a wildcard: "
        '`{"gpt-*": {"input": 2.5, "cached_input": 1.25, "output": 10}}`. Models without a price cost nothing.',
    )
    price_file: str = Field(
        default="",
        description="File with more prices, a JSON object like `prices`, which takes precedence; `fulmen proxy import-prices` creates one.",
    )
    assumed_completion_tokens: int = Field(
        default=1024,
        ge=0,
        le=10**6,
        description="Completion tokens reserved against a token limit for a call that sets no maximum.",
    )
    max_in_flight: int = Field(
        default=4096,
        ge=1,
        description="Maximum number of calls in flight in this process; further calls get 429 with Retry-After.",
    )
    retry_deadline_s: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="Retry deadline of a call whose backend fails or refuses it, seconds; at most nine tenths of the "
        "time that the caller waits, or 10 s if the caller does not specify it. 0 disables retries.",
    )
    answer_deadline_s: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="Timeout until the complete answer, or a stream's first event, retries included, seconds; then 504.",
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60, description="Connect timeout of backends, seconds.")
    first_byte_timeout_s: float = Field(
        default=600.0, gt=0, description="Timeout for the first byte of a backend's answer, seconds."
    )
    read_timeout_s: float = Field(
        default=600.0, gt=0, description="Read timeout between two pieces of a backend's stream, seconds."
    )
    queue_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Timeout for a slot of a backend, seconds; then 429 with Retry-After.",
    )
    max_waiting_per_backend: int = Field(
        default=1024,
        ge=0,
        description="Maximum number of calls waiting for a slot of one backend; further calls get 429 immediately.",
    )
    engine_cache_share: float = Field(
        default=1.0,
        ge=0,
        le=8,
        description="Share of an engine's key-value cache that the attempts of this proxy may fill; further attempts "
        "wait for their turn. Set it to 1 divided by the number of proxies, or more if prompts have much in common; 0"
        " disables the limit.",
    )
    recheck_s: float = Field(
        default=2.0,
        ge=0,
        le=300,
        description="Time after which a failed backend without a health check is tried again, seconds.",
    )
    health_interval_s: float = Field(
        default=2.0, gt=0, le=300, description="Interval between health checks of a backend, seconds."
    )
    health_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Timeout of a health check, seconds.")
    cache_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        description="Memory of the answer cache, for routes with `cached`, bytes; 0 disables it.",
    )
    cache_ttl_s: float = Field(default=3600.0, gt=0, description="Lifetime of a cached answer, seconds.")
    replay_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=0,
        description="Memory for captured calls of lost attempts, from which attempts that continue them are answered,"
        " bytes; one attempt may use an eighth of it. 0: such attempts sample everything anew.",
    )
    cache_url: SecretStr = Field(
        default=SecretStr(""),
        description="Address of an answer cache that all proxies share in addition to their own memory, on a server "
        "with the Redis protocol: `rediss://:password@redis:6379/0`, `redis://` without TLS. Needs the package redis."
        " Empty: none. Secret.",
    )
    stored_responses: Literal["unless_false", "if_true", "never"] = Field(
        default="unless_false",
        description="Which responses of the Responses API the store keeps for models whose backend does not store them: all but those with "
        "`store` false, as OpenAI does; only those with `store` true; or none.",
    )
    capture_buffer_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=0,
        description="Memory for captures that the store has not acknowledged, bytes; beyond it, calls of attempts get 503.",
    )
    recording_buffer_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        description="Memory for recorded calls of apps that the store has not acknowledged, bytes; beyond it, calls "
        "are not recorded.",
    )
    spool_dir: str = Field(
        default="",
        description="Folder for captures while the store is unavailable; may be shared by proxies. Empty: memory only.",
    )
    spool_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum size of this process's captures on disk, bytes.",
    )
    summary_keep_s: float = Field(
        default=600.0,
        ge=1,
        description="Time for which an attempt's summary is kept after its last call or flush, seconds.",
    )

    @model_validator(mode="after")
    def _price_file_readable(self) -> Self:
        self._filed_prices = _read_prices(self.price_file) if self.price_file else {}
        return self

    def resolved_prices(self) -> dict[str, Price]:
        """Returns the prices of the file and of the setting, by pattern."""
        return {pattern: price.resolved() for pattern, price in (self._filed_prices | self.prices).items()}

    @model_validator(mode="after")
    def _guards_named_once(self) -> Self:
        names = [each.name for each in self.guards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"guards: {', '.join(twice)} is named twice")
        return self

    @model_validator(mode="after")
    def _passed_paths_free(self) -> Self:
        for path in self.pass_on:
            if not _PASSED_PATH.fullmatch(path):
                raise ValueError(f"pass_on: {path!r} is not of the form {_PASSED_PATH.pattern}")
            if path in BY_PATH or path.startswith(_OWN_PATHS):
                raise ValueError(f"pass_on: the proxy serves {path} itself")
        return self

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        keys = split_keys(self.attempt_key_secret.get_secret_value())
        if not keys and not self.dev_mode:
            raise ValueError(
                "attempt_key_secret is required (`fulmen token --attempt-key-secret` prints it), or dev_mode=true on a "
                "loopback host"
            )
        if problem := problem_of(keys):
            raise ValueError(f"attempt_key_secret {problem}")
        return self

    @model_validator(mode="after")
    def _vendors_known(self) -> Self:
        for name in self._vendors():
            if name not in VENDORS:
                raise ValueError(f"vendors: {name!r} is not known; known are {', '.join(VENDORS)}")
            if not os.environ.get(VENDORS[name].variable):
                raise ValueError(f"vendors: {VENDORS[name].variable} is not set")
        return self

    @model_validator(mode="after")
    def _origins_valid(self) -> Self:
        wrong = [each for each in self.origins() if not _ORIGIN.fullmatch(each)]
        if wrong:
            raise ValueError(f"cors_origins: {', '.join(wrong)}: not of the form https://host or https://host:port")
        return self

    def origins(self) -> list[str]:
        """Returns the setting `cors_origins` as a list."""
        return _words(self.cors_origins)

    def _vendors(self) -> list[str]:
        return _words(self.vendors)

    def vendors_backend_keys(self) -> dict[str, BackendKey]:
        """Returns the keys of vendors from their usual variables."""
        found = {name: VENDORS[name] for name in self._vendors()}
        return {
            name: BackendKey(key=SecretStr(os.environ[vendor.variable]), hosts=(vendor.host,))
            for name, vendor in found.items()
        }

    def current_backend_keys(self) -> Mapping[str, BackendKey]:
        """Returns the setting `backend_keys`; from a file, as the file is now.

        Raises:
            ValueError: if the file is no longer valid.
        """
        file = self._secret_files.get("backend_keys")
        return self.backend_keys if file is None else _BACKEND_KEYS.validate_json(file.content())

    @property
    def worker_cache_share(self) -> float:
        """Part of an engine's cache that the attempts of one worker may fill."""
        return self.engine_cache_share / self.workers

    def attempt_secrets(self) -> SigningKeys:
        """Returns the secrets of attempt keys, which follow their file."""
        return SigningKeys(self.secret("attempt_key_secret"))
