"""Settings of the console, read from FULMEN_CONSOLE_* variables."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from fulmen_service_kit.security.secret import problem_of, split_keys
from fulmen_service_kit.settings import ServiceSettings, settings_config

__all__ = ["ConsoleSettings"]


class ConsoleSettings(ServiceSettings):
    """Settings of the console."""

    model_config = settings_config("FULMEN_CONSOLE_")
    service_name: ClassVar[str] = "console"

    store_target: str = Field(description="Store, `host:port`.")
    llm_proxy_target: str = Field(default="", description="LLM proxy, `host:port`. Empty: its rpcs are not offered.")
    algorithm_target: str = Field(
        default="", description="Algorithm service, `host:port`. Empty: its rpcs are not offered."
    )
    tinker_models: dict[str, str] = Field(
        default_factory=dict,
        description="JSON object of base models for programs of Tinker's API (docs/tinker.md): `hf:org/name`, `model:alias`, a version or"
        " a folder of the algorithm service, by the name that programs use. Other names `org/name` are looked up on the hub.",
    )
    http_port: int = Field(default=0, ge=0, le=65535, description="HTTP port; 0 selects a free one.")
    path_prefix: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Path under which a reverse proxy serves the console, such as `/fulmen`.",
    )
    is_public_https: bool = Field(
        default=False,
        description="Whether browsers reach the console over HTTPS through a reverse proxy; cookies are then sent over HTTPS only, as "
        "they are with `tls_certificate_file`.",
    )
    session_key: SecretStr = Field(
        default=SecretStr(""),
        description="Keys that sessions are encrypted with, one per line, at least 32 bytes each: the first encrypts, all are "
        "accepted. The same for all replicas. Empty: a new key at each start, which ends all sessions. Secret.",
    )
    session_idle_s: float = Field(
        default=8 * 3600.0, gt=0, le=30 * 86_400, description="Time without a call after which a session ends, seconds."
    )
    session_max_s: float = Field(
        default=7 * 86_400.0, gt=0, le=90 * 86_400, description="Time after which people sign in again, seconds."
    )
    heartbeat_s: float = Field(
        default=15.0,
        gt=0,
        le=600,
        description="Time without a message after which a stream sends an empty one, seconds.",
    )
    stream_limit_s: float = Field(
        default=3600.0,
        gt=0,
        le=86_400,
        description="Time after which a stream ends and its client resumes it, seconds.",
    )

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        keys = split_keys(self.session_key.get_secret_value())
        problem = problem_of(keys) if keys else None
        if problem is not None:
            raise ValueError(f"session_key {problem}")
        return self
