"""Settings of the runner that concern containers."""

from typing import Literal

from pydantic import Field

from fulmen_service_kit.settings import ServiceSettings, settings_config


class ContainerSettings(ServiceSettings):
    """Settings of containers; part of the runner's."""

    model_config = settings_config("FULMEN_RUNNER_")

    container_engine: str = Field(
        default="",
        pattern=r"^((unix|tcp|http|https)://.+|off)?$",
        description="The Docker engine, `unix:///var/run/docker.sock` or `tcp://host:2376`; `off` for none. "
        "Empty: DOCKER_HOST, or else /var/run/docker.sock. DOCKER_TLS_VERIFY and DOCKER_CERT_PATH are kept to.",
    )
    container_llm_proxy_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="The model proxy as containers reach it. Empty means llm_proxy_url.",
    )
    container_otlp_url: str = Field(
        default="", description="Where containers send spans, OTLP over gRPC. Empty means agents_otlp_url."
    )
    container_otlp_http_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="The same over HTTP. Empty means agents_otlp_http_url, or none if container_otlp_url is set.",
    )
    container_networks: str = Field(
        default="bridge",
        min_length=1,
        description="Networks that containers may join, separated by commas; the first is for those that name none.",
    )
    container_pull: Literal["missing", "always", "never"] = Field(
        default="missing", description="When images are pulled; `always` means once for each version of an agent."
    )
    container_capabilities: str = Field(
        default="", description="Linux capabilities that containers keep, separated by commas, such as `CHOWN`."
    )
    container_read_only: bool = Field(
        default=False, description="Whether containers can write to nothing but their working directory and /tmp."
    )
    container_memory_bytes: int = Field(
        default=4 * 1024**3,
        ge=16 * 1024**2,
        description="Memory of a container, and the most that an agent may ask for.",
    )
    container_cpu_count: float = Field(
        default=2.0, gt=0, le=1024, description="Processors of a container, and the most that an agent may ask for."
    )
    container_process_count: int = Field(
        default=512, ge=1, le=1_000_000, description="Processes and threads of a container, and the most there may be."
    )
