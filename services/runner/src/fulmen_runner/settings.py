"""Settings of the runner; environment prefix `FULMEN_RUNNER_`."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, model_validator

from fulmen_service_kit.isolation.levels import Isolation
from fulmen_service_kit.settings import ServiceSettings, settings_config

MAX_SLOTS = 10_000
AUTOMATIC: Final = "auto"
INITIAL_SLOTS: Final = 16
"""Initial number of automatic slots, within the limits."""

_WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104  # compared with, not bound to


class ContainerSettings(ServiceSettings):
    """Settings of containers."""

    model_config = settings_config("FULMEN_RUNNER_")

    container_engine: str = Field(
        default="",
        pattern=r"^((unix|tcp|http|https)://.+|off)?$",
        description="Docker engine, `unix:///var/run/docker.sock` or `tcp://host:2376`; `off` for none. Empty: DOCKER_HOST, or "
        "else /var/run/docker.sock. DOCKER_TLS_VERIFY and DOCKER_CERT_PATH apply.",
    )
    container_llm_proxy_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="Model proxy as seen by containers. Empty: llm_proxy_url.",
    )
    container_otlp_url: str = Field(
        default="", description="Receiver of containers' spans, OTLP over gRPC. Empty: agents_otlp_url."
    )
    container_otlp_http_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="Receiver of containers' spans, OTLP over HTTP. Empty: agents_otlp_http_url, or none if container_otlp_url is set.",
    )
    container_networks: str = Field(
        default="bridge",
        min_length=1,
        description="Networks that containers may join, comma-separated; the first is the default.",
    )
    container_pull: Literal["missing", "always", "never"] = Field(
        default="missing", description="When images are pulled; `always`: once per version of an agent."
    )
    container_capabilities: str = Field(
        default="", description="Linux capabilities that containers keep, comma-separated, such as `CHOWN`."
    )
    container_read_only: bool = Field(
        default=False, description="Whether containers can write only to their working directory and /tmp."
    )
    container_memory_bytes: int = Field(
        default=4 * 1024**3,
        ge=16 * 1024**2,
        description="Default and maximum memory limit of a container, bytes.",
    )
    container_cpu_count: float = Field(
        default=2.0, gt=0, le=1024, description="Default and maximum number of processors of a container."
    )
    container_process_count: int = Field(
        default=512,
        ge=1,
        le=1_000_000,
        description="Default and maximum number of processes and threads of a container.",
    )


class JobSettings(ServiceSettings):
    """Settings of Kubernetes Jobs."""

    model_config = settings_config("FULMEN_RUNNER_")

    job_kubeconfig: str = Field(
        default="",
        description="Path of a kubeconfig. Empty: KUBECONFIG, or else the pod's service account.",
    )
    job_kube_context: str = Field(default="", description="Context of the kubeconfig. Empty: its current one.")
    job_namespace: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        description="Namespace of Jobs. Empty: the namespace of the context or of the runner's pod, or `default`.",
    )
    job_llm_proxy_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="Model proxy as seen by pods. Empty: llm_proxy_url.",
    )
    job_otlp_url: str = Field(
        default="", description="Receiver of pods' spans, OTLP over gRPC. Empty: agents_otlp_url."
    )
    job_otlp_http_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="Receiver of pods' spans, OTLP over HTTP. Empty: agents_otlp_http_url, or none if job_otlp_url is set.",
    )
    job_host_access: bool = Field(
        default=False,
        description="Whether templates may use the node (hostPath, hostNetwork, privileged and the like) and the "
        "namespace's Secrets and service accounts.",
    )
    job_start_s: float = Field(
        default=300.0, gt=0, le=86_400, description="Timeout for scheduling a Job's pod, seconds."
    )
    job_image_s: float = Field(default=60.0, gt=0, le=86_400, description="Timeout for pulling a Job's image, seconds.")
    job_ttl_s: int = Field(
        default=600,
        ge=0,
        le=604_800,
        description="Time after which the cluster deletes an ended Job whose runner is dead, seconds.",
    )
    job_memory_bytes: int = Field(
        default=4 * 1024**3,
        ge=16 * 1024**2,
        description="Default and maximum memory limit of each container of a Job, bytes.",
    )
    job_cpu_count: float = Field(
        default=2.0,
        gt=0,
        le=1024,
        description="Default and maximum number of processors of each container of a Job.",
    )


class VenvSettings(ServiceSettings):
    """Settings of agents' own virtual environments."""

    model_config = settings_config("FULMEN_RUNNER_")

    venv_folders: str = Field(
        default="",
        description="Folders below which agents may name a virtual environment, comma-separated. Isolation `trusted`: any.",
    )
    venvs_dir: str = Field(
        default="",
        description="Folder of the virtual environments built from requirements, shared by the runners of a user on a machine. "
        "Empty: fulmen-venvs-<uid> in the system's temporary directory.",
    )
    venvs_bytes: int = Field(
        default=20 * 1024**3,
        ge=0,
        description="Maximum size of all these environments together, bytes; the least recently used ones are deleted. 0: none is built.",
    )
    venv_bytes: int = Field(
        default=8 * 1024**3, ge=1024**2, description="Maximum size of one environment and its build, bytes."
    )
    venv_build_s: float = Field(default=600.0, gt=0, le=86_400, description="Timeout of a build, seconds.")
    package_index_url: SecretStr = Field(
        default=SecretStr(""),
        description="Package index for builds. Empty: the default of uv or pip; `off`: none. May contain a password. Secret.",
    )
    package_extra_index_urls: SecretStr = Field(
        default=SecretStr(""), description="Further package indexes, comma-separated. Secret."
    )
    package_folders: str = Field(
        default="", description="Folders with wheels for builds (`--find-links`), comma-separated."
    )
    package_builds: bool = Field(
        default=False,
        description="Whether packages may be built from source. Their code then runs where it can read the addresses of the indexes.",
    )

    @property
    def venvs_folder(self) -> Path:
        """Folder of the virtual environments."""
        return Path(self.venvs_dir or Path(tempfile.gettempdir()) / f"fulmen-venvs-{os.geteuid()}")


class RunnerSettings(ContainerSettings, JobSettings, VenvSettings):
    """Settings of the runner."""

    model_config = settings_config("FULMEN_RUNNER_")

    service_name: ClassVar[str] = "runner"

    port: int = Field(default=7401, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    metrics_port: int = Field(default=7402, ge=0, le=65535, description="Port of /metrics; 0 selects a free one.")
    drain_grace_s: float = Field(
        default=30.0, ge=0, le=3600, description="Grace period for running attempts when the runner stops, seconds."
    )
    store_target: str = Field(default="127.0.0.1:7101", description="Address of the store, `host:port`.")
    token: SecretStr = Field(default=SecretStr(""), description="Token of role `runner`. Secret.")
    llm_proxy_url: str = Field(
        default="", pattern=r"^(https?://[^/]+/?)?$", description="Model proxy for agents, `http://host:7200`."
    )
    llm_proxy_targets: str = Field(
        default="",
        description="gRPC addresses of the proxies behind llm_proxy_url, `host:port` or a gRPC name, comma-separated; any proxy answers for all.",
    )
    agents_otlp_url: str = Field(
        default="", description="Receiver of agents' spans, OTLP over gRPC. Empty: the store, http://<store_target>."
    )
    agents_otlp_http_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="Receiver of agents' spans, OTLP over HTTP, `http://host:7103`; FULMEN_TRACES_URL of agents.",
    )
    agents_ca_file: str = Field(
        default="",
        description="PEM file of the CAs that agents on this machine trust, for a private CA of proxy and store. Include the "
        "CAs of other servers that agents call.",
    )
    instrument: str = Field(
        default="auto",
        pattern=r"^[A-Za-z0-9_., -]+$",
        description="OpenTelemetry and OpenInference instrumentors to enable in Python agents: `auto` for installed ones of "
        "models and agents, `none`, or comma-separated names.",
    )
    slots: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_SLOTS)] = Field(
        default=64, description="Number of attempts that run concurrently; `auto` adapts it to the load."
    )
    slots_min: int = Field(default=1, ge=1, le=MAX_SLOTS, description="Minimum number of slots with `auto`.")
    slots_max: int = Field(default=512, ge=1, le=MAX_SLOTS, description="Maximum number of slots with `auto`.")
    slots_memory_share: float = Field(
        default=0.85, gt=0, le=1, description="Share of the memory limit above which `auto` reduces the slots."
    )
    advertise_address: str = Field(
        default="",
        max_length=256,
        description="Advertised address of this runner, `host:port`. Empty: `host` (or runner_host) and port.",
    )
    labels: str = Field(default="", description="Labels that rollouts may require, `key=value`, comma-separated.")
    projects: str = Field(
        default="", description="Projects whose rollouts this runner runs, comma-separated. Empty: all."
    )
    runner_host: str = Field(default_factory=socket.gethostname, max_length=128, description="Host or pod name.")
    agent: str = Field(
        default="", description="Python target (`file.py:name`) of the default agent, for rollouts that name none."
    )
    grader: str = Field(default="", description="Python target of the default agent's grader.")
    isolation: Isolation = Field(
        default=Isolation.SANDBOX,
        description="Least isolation of agents and graders, which they can only raise: `trusted` (as the runner itself), "
        "`process`, `sandbox`, `container` or `job` (docs/agents.md).",
    )
    sandbox_readable: str = Field(
        default="",
        description="Further files and folders that sandboxed agents may read, comma-separated.",
    )
    child_attempts: int = Field(
        default=100, ge=1, le=1_000_000, description="Attempts per child process; 1 starts one for each attempt."
    )
    child_idle_count: int = Field(default=8, ge=0, le=1000, description="Maximum number of idle child processes.")
    child_idle_s: float = Field(default=60.0, gt=0, le=86_400, description="Idle timeout of a child process, seconds.")
    inherit_environment: str = Field(
        default="", description="Further environment variables that commands inherit from the runner, comma-separated."
    )
    work_dir: str = Field(
        default="",
        description="Parent of the directory for bundles and attempts' files. Empty: the system's temporary directory.",
    )
    max_command_output_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=65_536,
        description="Maximum output of a command, bytes; above it the command is killed.",
    )
    printed_bytes: int = Field(
        default=8192,
        ge=0,
        le=32_768,
        description="Size of the end of an agent's standard output, and of its standard error, that is kept with an ended attempt, "
        "bytes; 0: nothing is kept. Not for agents in the runner's own process.",
    )
    attempt_memory_bytes: int = Field(
        default=4 * 1024**3, ge=0, description="Memory limit of all processes of an attempt, bytes; 0: no limit."
    )
    attempt_processes: int = Field(
        default=4096, ge=0, description="Limit of concurrent processes and threads of an attempt; 0: no limit."
    )
    attempt_disk_bytes: int = Field(
        default=4 * 1024**3,
        ge=0,
        description="Limit of the files of an attempt, each and together, bytes; 0: no limit.",
    )
    proxy_reach_s: float = Field(
        default=60.0, gt=0, le=3600, description="Timeout for reaching the proxies when an attempt starts, seconds."
    )
    flush_s: float = Field(
        default=30.0, gt=0, le=3600, description="Timeout for storing an attempt's spans when it ends, seconds."
    )

    loop_blocked_limit_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="Time after which a blocked event loop ends the runner, so that its attempts run elsewhere, seconds; 0: never.",
    )
    hooks: str = Field(
        default="",
        description="Hooks around attempts, comma-separated `module:name`, such as `fulmen_runner.hooks.monitor:Monitor`.",
    )
    hook_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="Timeout of one hook call, seconds.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any("=" not in label for label in split(self.labels)):
            raise ValueError("labels must be comma-separated `key=value` pairs")
        if self.slots_min > self.slots_max:
            raise ValueError("slots_min is greater than slots_max")
        if self.llm_proxy_url and not self.llm_proxy_targets:
            raise ValueError("llm_proxy_url needs llm_proxy_targets: spans must be confirmed before an attempt ends")
        if not self.dev_mode and not self.token.get_secret_value():
            raise ValueError("token is required (`fulmen token issue --role runner`)")
        return self

    @property
    def max_slots(self) -> int:
        """Largest number of slots that the settings allow."""
        return self.slots_max if self.slots == AUTOMATIC else self.slots

    def address(self, port: int) -> str:
        """Returns the advertised address of the runner's rpcs, `host:port`."""
        if self.advertise_address:
            return self.advertise_address
        host = self.runner_host if self.host in _WILDCARD_HOSTS else self.host
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

    def label_map(self) -> dict[str, str]:
        """Returns the labels by key."""
        pairs = (label.partition("=") for label in split(self.labels))
        return {key.strip(): value.strip() for key, _, value in pairs}


def split(value: str) -> list[str]:
    """Returns the items of a comma-separated setting."""
    return [part.strip() for part in value.split(",") if part.strip()]
