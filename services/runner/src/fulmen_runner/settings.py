"""Settings of the runner; environment prefix `FULMEN_RUNNER_`."""

import socket
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, model_validator

from fulmen_runner import container_settings, job_settings
from fulmen_runner.slots.control import SlotControl, SlotPolicy
from fulmen_service_kit.settings import settings_config

MAX_SLOTS = 10_000
AUTOMATIC: Final = "auto"
FIRST_SLOTS: Final = 16
"""What `auto` begins with, within its limits."""

_WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104  # compared with, not bound to


class RunnerSettings(container_settings.ContainerSettings, job_settings.JobSettings):
    """Settings of the runner."""

    model_config = settings_config("FULMEN_RUNNER_")

    service_name: ClassVar[str] = "runner"

    port: int = Field(default=7401, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    metrics_port: int = Field(default=7402, ge=0, le=65535, description="Port of /metrics; 0 takes a free one.")
    drain_grace_s: float = Field(
        default=30.0, ge=0, le=3600, description="How long a stop waits for running attempts, seconds."
    )
    store_target: str = Field(default="127.0.0.1:7101", description="The store, `host:port`.")
    token: SecretStr = Field(default=SecretStr(""), description="Token of role `runner`. Secret.")
    llm_proxy_url: str = Field(
        default="", pattern=r"^(https?://[^/]+/?)?$", description="Where agents send model calls, `http://host:7200`."
    )
    llm_proxy_targets: str = Field(
        default="", description="gRPC addresses of all proxies behind llm_proxy_url, `host:port`, separated by commas."
    )
    agents_otlp_url: str = Field(
        default="", description="Where agents send spans, OTLP over gRPC. Empty means the store: http://<store_target>."
    )
    agents_otlp_http_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="The same over HTTP, `http://host:7103`: FULMEN_TRACES_URL of agents, for those without gRPC.",
    )
    agents_ca_file: str = Field(
        default="",
        description="PEM file of the authorities that agents on this machine trust, where proxy and store have a certificate "
        "of your own; those of other servers that agents call belong into it, too.",
    )
    instrument: str = Field(
        default="auto",
        pattern=r"^[A-Za-z0-9_., -]+$",
        description="Installed OpenTelemetry and OpenInference instrumentors for Python agents: `auto`: of models and "
        "agents; `none`; or names, separated by commas.",
    )
    slots: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_SLOTS)] = Field(
        default=64, description="How many attempts run at once; `auto` lets the runner decide."
    )
    slots_min: int = Field(default=1, ge=1, le=MAX_SLOTS, description="The fewest slots that `auto` decides.")
    slots_max: int = Field(default=512, ge=1, le=MAX_SLOTS, description="The most slots that `auto` decides.")
    slots_memory_share: float = Field(
        default=0.85, gt=0, le=1, description="Share of the memory limit above which `auto` takes slots away."
    )
    advertise_address: str = Field(
        default="",
        max_length=256,
        description="Where people and tools reach this runner, `host:port`. Empty: `host` (or runner_host) and port.",
    )
    labels: str = Field(default="", description="Labels that rollouts may require, `key=value`, separated by commas.")
    projects: str = Field(default="", description="Only work of these projects, separated by commas. Empty means all.")
    runner_host: str = Field(default_factory=socket.gethostname, max_length=128, description="Host or pod name.")
    agent: str = Field(
        default="", description="Python target (`file.py:name`) of the agent for rollouts that name none."
    )
    grader: str = Field(default="", description="Python target of the grader that goes with `agent`.")
    isolation: Literal["runner", "process"] = Field(
        default="runner", description="Where Python agents and graders run that do not say: in the runner or a child."
    )
    child_attempts: int = Field(
        default=100, ge=1, le=1_000_000, description="How many attempts a child runs; 1 gives each its own."
    )
    child_idle_count: int = Field(default=8, ge=0, le=1000, description="How many children wait for work at most.")
    child_idle_s: float = Field(
        default=60.0, gt=0, le=86_400, description="How long a child waits for work before it is ended, seconds."
    )
    inherit_environment: str = Field(
        default="", description="Further variables of the runner that commands get, separated by commas."
    )
    work_dir: str = Field(
        default="", description="Parent of the directory for bundles and task files. Empty: system's."
    )
    max_command_output_bytes: int = Field(
        default=64 * 1024 * 1024, ge=65_536, description="A command that writes more than this is killed, bytes."
    )
    attempt_memory_bytes: int = Field(
        default=0, ge=0, description="The most memory of an attempt's processes together, bytes; 0 is no limit."
    )
    attempt_processes: int = Field(
        default=4096, ge=0, description="The most processes and threads of an attempt at once; 0 is no limit."
    )
    proxy_reach_s: float = Field(
        default=60.0, gt=0, le=3600, description="How long an attempt waits for the proxies before it begins, seconds."
    )
    flush_s: float = Field(
        default=30.0, gt=0, le=3600, description="How long an attempt waits for its spans at its end, seconds."
    )

    loop_blocked_limit_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="An async agent that blocks the runner for longer ends it, so that attempts run elsewhere; 0: never.",
    )
    hooks: str = Field(
        default="",
        description="Hooks around attempts, `module:name` separated by commas, such as `fulmen_runner.hooks.monitor:Monitor`.",
    )
    hook_deadline_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="How long one call of a hook may take before it is left behind, seconds.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any("=" not in label for label in split(self.labels)):
            raise ValueError("labels are `key=value`, separated by commas")
        if self.slots_min > self.slots_max:
            raise ValueError("slots_min is greater than slots_max")
        if self.llm_proxy_url and not self.llm_proxy_targets:
            raise ValueError("llm_proxy_url needs llm_proxy_targets: spans must be confirmed before an attempt ends")
        if not self.dev_mode and not self.token.get_secret_value():
            raise ValueError("token is needed (`fulmen token issue --role runner`)")
        return self

    @property
    def most_slots(self) -> int:
        """The most slots that these settings allow."""
        return self.slots_max if self.slots == AUTOMATIC else self.slots

    def slot_control(self) -> SlotControl:
        """Makes what decides, or keeps, the number of slots."""
        automatic = self.slots == AUTOMATIC
        return SlotControl(
            policy=SlotPolicy(floor=self.slots_min, ceiling=self.slots_max, memory_share=self.slots_memory_share),
            limit=FIRST_SLOTS if self.slots == AUTOMATIC else self.slots,
            automatic=automatic,
        )

    def address(self, port: int) -> str:
        """Returns where people and tools reach this runner, which listens on a port."""
        if self.advertise_address:
            return self.advertise_address
        host = self.runner_host if self.host in _WILDCARD_HOSTS else self.host
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

    def label_map(self) -> dict[str, str]:
        """Returns the labels by key."""
        pairs = (label.partition("=") for label in split(self.labels))
        return {key.strip(): value.strip() for key, _, value in pairs}


def split(value: str) -> list[str]:
    """Splits a list of a setting at its commas."""
    return [part.strip() for part in value.split(",") if part.strip()]
