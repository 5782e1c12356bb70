"""Settings of the runner that concern Kubernetes Jobs."""

from pydantic import Field

from fulmen_service_kit.settings import ServiceSettings, settings_config


class JobSettings(ServiceSettings):
    """Settings of Jobs; part of the runner's."""

    model_config = settings_config("FULMEN_RUNNER_")

    job_kubeconfig: str = Field(
        default="",
        description="Path of a kubeconfig. Empty: KUBECONFIG, or else the service account of the runner's pod.",
    )
    job_kube_context: str = Field(default="", description="Context of the kubeconfig. Empty means its current one.")
    job_namespace: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        description="Where Jobs are made. Empty: the namespace of the context or of the runner's pod, or `default`.",
    )
    job_llm_proxy_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="The model proxy as pods reach it. Empty means llm_proxy_url.",
    )
    job_otlp_url: str = Field(
        default="", description="Where pods send spans, OTLP over gRPC. Empty means agents_otlp_url."
    )
    job_otlp_http_url: str = Field(
        default="",
        pattern=r"^(https?://[^/]+/?)?$",
        description="The same over HTTP. Empty means agents_otlp_http_url, or none if job_otlp_url is set.",
    )
    job_host_access: bool = Field(
        default=False,
        description="Whether templates may use the node (hostPath, hostNetwork, privileged and the like) and the "
        "namespace's Secrets and service accounts.",
    )
    job_start_s: float = Field(
        default=300.0, gt=0, le=86_400, description="How long a Job may wait for a node that has room for it, seconds."
    )
    job_image_s: float = Field(
        default=60.0, gt=0, le=86_400, description="How long a Job's image may fail to be pulled, seconds."
    )
    job_ttl_s: int = Field(
        default=600,
        ge=0,
        le=604_800,
        description="When the cluster deletes an ended Job whose runner is gone, seconds.",
    )
    job_memory_bytes: int = Field(
        default=4 * 1024**3,
        ge=16 * 1024**2,
        description="Memory of each container of a Job, and the most that one may ask for.",
    )
    job_cpu_count: float = Field(
        default=2.0,
        gt=0,
        le=1024,
        description="Processors of each container of a Job, and the most that one may ask for.",
    )
