"""Settings of the store; environment variables with the prefix `FULMEN_STORE_`."""

from __future__ import annotations

import socket
from typing import ClassVar, Final

from pydantic import Field, SecretStr, field_validator

from fulmen_service_kit.settings import KeyHolderSettings, settings_config
from fulmen_store.usage.compute import price_problem

__all__ = ["StoreSettings"]

_WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104  # compared with, not bound to


class StoreSettings(KeyHolderSettings):
    """Settings of the store."""

    model_config = settings_config("FULMEN_STORE_")
    service_name: ClassVar[str] = "store"

    port: int = Field(default=7101, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    metrics_port: int = Field(
        default=7102, ge=0, le=65535, description="Port of /metrics over HTTP; 0 selects a free one."
    )
    http_port: int = Field(default=7103, ge=0, le=65535, description="Port of OTLP over HTTP; 0 selects a free one.")
    database_url: SecretStr = Field(description="URL of the PostgreSQL database; it may contain a password. Secret.")
    standby_url: SecretStr = Field(
        default=SecretStr(""),
        description="URL of a streaming standby of the database, which answers lists and reports; while it is "
        "unavailable or lags behind, the primary does. Secret.",
    )
    auto_migrate: bool = Field(
        default=True,
        description="`serve` brings the schema up to date before it serves, as `migrate` does without `--post`.",
    )
    database_connections: int = Field(default=5, ge=2, le=100, description="Connections to PostgreSQL.")
    database_start_limit_s: float = Field(
        default=30.0, ge=0, le=600, description="Time to wait for PostgreSQL at startup, seconds."
    )
    blob_url: str = Field(
        default="",
        max_length=1024,
        description="Storage for spans of ended rollouts: file:///folder, s3://bucket/prefix, gs:// or az://; empty: "
        "PostgreSQL.",
    )
    segment_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=0,
        le=256 * 1024 * 1024,
        description="Size of a full segment of spans in `blob_url`, bytes; 0: no segments; chunks of at least "
        "`blob_min_bytes` are stored there one by one.",
    )
    segment_after_s: float = Field(
        default=3600.0,
        ge=0,
        le=365 * 86_400,
        description="Time after its end until a rollout's spans may be moved into a segment, seconds.",
    )
    blob_min_bytes: int = Field(
        default=32 * 1024,
        ge=1,
        le=2**31 - 1,
        description="Without segments, the minimum size of a chunk of spans that is stored in `blob_url`, bytes.",
    )
    recorded_bytes_per_project: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum size of a project's recorded calls: bytes of texts, and 1 KiB for each call; beyond it "
        "the oldest calls are removed.",
    )
    stored_response_bytes_per_project: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum size of a project's stored responses: bytes of input and output, and 1 KiB for each "
        "response; beyond it the oldest responses are removed, and their conversations cannot be continued.",
    )
    stored_response_retention_s: float = Field(
        default=30 * 86_400.0,
        ge=60,
        le=3650 * 86_400,
        description="Retention of stored responses, seconds. Responses of an attempt are removed when its key expires.",
    )
    compute_prices: dict[str, float] = Field(
        default_factory=dict,
        description="US dollars per hour of an attempt by label of its runner, a JSON object: "
        '`{"gpu=a100": 2.5, "*": 0.05}`; `*` is for runners without one of the others. These costs count towards budgets, as calls do.',
    )
    lease_ttl_s: float = Field(
        default=15.0, ge=0.3, le=3600, description="Lifetime of a runner session without activity, seconds."
    )
    attempt_grace_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Time after an attempt's timeout in which it may still be reported before the store ends it, seconds.",
    )
    attempt_key_grace_s: float = Field(
        default=60.0,
        ge=0,
        le=3600,
        description="Time after an attempt's end in which its key may still add spans, seconds.",
    )
    cancel_grace_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Time that a runner has to stop a cancelled attempt before the store ends it, seconds.",
    )
    unowned_run_limit_s: float = Field(
        default=3600.0,
        ge=10,
        le=30 * 86_400,
        description="Time after which the rollouts of a training run that no algorithm service runs are cancelled, "
        "seconds.",
    )
    lost_to_pause: int = Field(
        default=3,
        ge=1,
        le=10,
        description="Rollouts of an agent version that end as RUNNER_LOST, each within a day of the one before, until the "
        "version is paused.",
    )
    poll_interval_s: float = Field(
        default=0.5, ge=0.01, le=60, description="Interval of polls for work and events of other replicas, seconds."
    )
    advertise_address: str = Field(
        default="",
        max_length=260,
        description="`host:port` at which the other replicas reach this one; unset: the host, or the machine's name where "
        "the host is a wildcard, and the port.",
    )
    notify_peers: bool = Field(
        default=True, description="Notifies the other replicas of events; without it they rely on polling."
    )
    drain_notice_s: float = Field(
        default=2.0, ge=0, le=3600, description="Time that runners have to move when this replica shuts down, seconds."
    )

    @field_validator("compute_prices")
    @classmethod
    def _priced(cls, prices: dict[str, float]) -> dict[str, float]:
        if problem := price_problem(prices):
            raise ValueError(problem)
        return prices

    def peer_address(self, port: int) -> str:
        """Returns where the other replicas reach this one, which listens on a port."""
        if self.advertise_address:
            return self.advertise_address
        host = socket.gethostname() if self.host in _WILDCARD_HOSTS else self.host
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
