"""Settings of the algorithm service, from variables that begin with `FULMEN_ALGORITHM_`."""

import socket
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from fulmen_algorithm.cluster.settings import ClusterName, ClusterSettings, LocalSettings
from fulmen_algorithm.sinks.sink import NAMES as SINK_NAMES
from fulmen_algorithm.training.compute import THIS_MACHINE
from fulmen_service_kit.isolation.levels import Isolation
from fulmen_service_kit.settings import ServiceSettings, is_loopback, settings_config

ALGORITHM_PORT = 7301
METRICS_PORT = 7302
WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104  # compared with, not bound to


def _this_machine() -> dict[str, ClusterSettings]:
    return {THIS_MACHINE: LocalSettings()}


class AlgorithmServiceSettings(ServiceSettings):
    """State folder, connections, engines and limits of the algorithm service."""

    model_config = settings_config("FULMEN_ALGORITHM_")
    service_name: ClassVar[str] = "algorithm"
    # Results of a trainer's step and of sampling have numbers for each token.
    max_sent_bytes: ClassVar[int] = 20 * 1024 * 1024

    port: int = Field(default=ALGORITHM_PORT, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    metrics_port: int = Field(
        default=METRICS_PORT, ge=0, le=65535, description="Port of /metrics over HTTP; 0 selects a free one."
    )
    state_dir: Path = Field(
        default=Path(".fulmen/algorithm"), description="Folder of this process's state; survives restarts."
    )
    run_storage: str = Field(
        default="",
        max_length=1024,
        description="Where runs are kept, with checkpoints and published models: a folder, which all algorithm services mount at"
        " the same path, or `s3://bucket/prefix`, `gs://` or `az://`; unset: in `state_dir`.",
    )
    run_lease_s: float = Field(
        default=20.0,
        ge=1,
        le=600,
        description="Time without a renewal of its lease after which another algorithm service takes over a run, in seconds.",
    )
    advertise_address: str = Field(
        default="",
        max_length=260,
        description="`host:port` at which the other algorithm services reach this one; unset: the host, or the machine's name"
        " where the host is a wildcard, and the port.",
    )
    model_roots: str = Field(
        default="",
        description="Folders below which `policy.path` of a run and the paths of policy versions must be, separated by `:`;"
        " the folders of runs are always included. `/` allows any folder.",
    )
    hub_models: str = Field(
        default="",
        description="Models of the hub from which runs may start, as patterns of `organisation/name`, separated by commas, such as"
        " `Qwen/*`; `*` allows any, empty none. The hub is configured as for huggingface_hub: HF_ENDPOINT, HF_HUB_OFFLINE.",
    )
    hub_cache: str = Field(
        default="", description="Folder for models of the hub; unset: the folder of huggingface_hub (HF_HOME)."
    )
    hub_token: SecretStr = Field(
        default=SecretStr(""),
        description="Token for private and gated models; unset: the token of huggingface_hub (HF_TOKEN). Secret.",
    )
    hub_max_bytes: int = Field(
        default=200 * 10**9, ge=1, description="Maximum size of a model that is downloaded, in bytes."
    )
    hub_deadline_s: float = Field(
        default=6 * 3600.0, gt=0, description="Timeout for the download of a model, including retries, in seconds."
    )
    upload_max_bytes: int = Field(default=128 * 2**30, ge=1, description="Maximum size of an uploaded model, in bytes.")
    upload_quota_bytes: int = Field(
        default=512 * 2**30,
        ge=1,
        description="Maximum size of all uploaded models of a project, including unfinished uploads, in bytes.",
    )
    upload_idle_s: float = Field(
        default=3600.0,
        ge=1,
        description="Time without data after which an upload is removed, in seconds.",
    )
    upload_keep_s: float = Field(
        default=0.0,
        ge=0,
        description="Time after its last use after which an uploaded model is deleted, in seconds, unless a run that "
        "has not ended starts from it. 0: never.",
    )
    max_transfers: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Maximum number of streams of a project that upload or download weights at the same time. Their "
        "total rate is limited by `project_calls_per_s`.",
    )
    store_target: str = Field(default="127.0.0.1:7101", description="gRPC address of the store.")
    llm_proxy_target: str = Field(default="127.0.0.1:7201", description="gRPC address of the LLM proxy.")
    token: SecretStr = Field(
        default=SecretStr(""), description="Token of role `service` for the store and the proxy. Secret."
    )
    outage_limit_s: float = Field(
        default=1800.0, gt=0, description="Maximum wait of a run for another service before it fails, in seconds."
    )
    engine_host: str = Field(default="127.0.0.1", description="Address that the generation engine binds to.")
    engine_advertise_host: str = Field(
        default="127.0.0.1", description="Host under which the proxy reaches the engine."
    )
    engine_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the first engine; the others use the next ports. 0 selects free ones.",
    )
    engine_token: SecretStr = Field(
        default=SecretStr(""),
        description="Token that the engine requires; also the entry `engine` of the proxy's `backend_keys`. Secret.",
    )
    engine_backend: str = Field(
        default="engine",
        pattern=r"^[a-z0-9._-]{1,32}$",
        description="Prefix of the ids of the engines' backends at the proxy, followed by `-` and the policy.",
    )
    max_engines: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Maximum number of engines; engines of ended runs are stopped when the limit is reached.",
    )
    engine_max_batch_size: int = Field(default=64, ge=1, description="Maximum batch size of generation, in requests.")
    engine_fan_out: int = Field(
        default=2,
        ge=0,
        le=64,
        description="Number of joined engines of a run that fetch a version from this service at the same time, and "
        "from each engine that has it or is fetching it; 0: all fetch it from this service.",
    )
    engine_in_process: bool = Field(
        default=False, description="Runs the engine in the service's process, for debugging; not for training."
    )
    warm_start: bool = Field(
        default=True,
        description="Forks engines, and in a local stack the restarted service, from a process that has loaded torch: they "
        "start in about a second instead of several. It shares most of its 400 MB with them. Linux only.",
    )
    vllm_command: str = Field(
        default="vllm", min_length=1, description="The vLLM program, for runs whose engine is `vllm`."
    )
    vllm_start_deadline_s: float = Field(default=600.0, gt=0, description="Start timeout of vLLM, in seconds.")
    external_engines: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="JSON object of the vLLM servers that runs may use as `external` engines: API key, empty for none, by address"
        " such as `http://10.0.0.7:8000/v1`. Secret.",
    )
    chat_endpoints: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="JSON object of the OpenAI-compatible endpoints that runs may use for a critic or editor: API key, empty for"
        " none, by address such as `https://api.example.com/v1`. Secret.",
    )
    exchange_targets: dict[str, str] = Field(
        default_factory=dict,
        description="JSON object of the algorithm services through which ranks of runs may exchange gradients: PEM file of the"
        " server's certificate authorities, empty for no TLS, by address `host:port`. They receive a token of this"
        " service. This service itself is always included, at `127.0.0.1` and its port.",
    )
    exchange_folder: Path | None = Field(
        default=None,
        description="Folder of the sums that a restart, or a spare of a run's exchange, continues from; none: `exchange` in the"
        " state folder. Services that are spares of each other mount one folder here.",
    )
    exchange_max_shards: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Maximum number of shards of gradient sums held at a time, over all runs.",
    )
    exchange_max_elements: int = Field(
        default=2**31, ge=1, description="Maximum number of elements of one shard; each takes a few float32 of memory."
    )
    exchange_max_held_bytes: int = Field(
        default=8 * 2**30,
        ge=2**20,
        description="Memory of sums, residuals, payloads and replies, over all shards, in bytes. Shards and payloads"
        " beyond it are refused.",
    )
    exchange_forget_s: float = Field(
        default=600.0, gt=0, description="Time for which a shard stays in memory after all ranks have left, in seconds."
    )
    exchange_keep_s: float = Field(
        default=7 * 86_400.0,
        gt=0,
        description="Time for which unused sums of a run are kept in files, in seconds; sums of an ended run are kept"
        " only while the shard is in memory.",
    )
    exchange_sums: str = Field(
        default="synced",
        pattern=r"^(synced|written|none)$",
        description="Durability of a sum before ranks get it: flushed to disk, which survives a crash of the machine (`synced`);"
        " written to a file, which survives a crash of the service (`written`); in memory only (`none`).",
    )
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Device of training and engine.")
    torch_threads: int = Field(default=1, ge=1, le=1024, description="Threads of one torch operation.")
    kernels: str = Field(
        default="auto",
        pattern=r"^(auto|native|reference)$",
        description="Implementation of the loops over gradients: compiled if available (`auto`), compiled or an error"
        " (`native`), or torch operations (`reference`).",
    )
    trainer_deadline_s: float = Field(
        default=3600.0,
        gt=0,
        description="Timeout of one call to a group of ranks or the process of a trainer, after which it counts as lost, in seconds.",
    )
    max_trainers: int = Field(
        default=32, ge=1, le=10_000, description="Maximum number of trainers of a project (docs/trainers.md)."
    )
    max_trainer_processes: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Maximum number of processes that hold trainers: one for the trainers of a project with adapters on the same"
        " base, one for each other trainer in memory. The least recently used are saved and unloaded.",
    )
    max_trainer_checkpoints: int = Field(
        default=16, ge=1, le=1000, description="Maximum number of named checkpoints of a trainer."
    )
    max_trainer_bytes: int = Field(
        default=512 * 2**30,
        ge=0,
        description="Size of the states and checkpoints of a project's trainers above which no more are added, in bytes.",
    )
    max_trainer_rows: int = Field(
        default=4096, ge=1, le=1_000_000, description="Maximum number of rows in one call of a trainer."
    )
    max_trainer_tokens: int = Field(
        default=262_144, ge=2, le=2**24, description="Maximum number of tokens in one call of a trainer."
    )
    trainer_idle_s: float = Field(
        default=900.0,
        gt=0,
        description="Time without calls after which a trainer is saved and removed from memory, in seconds.",
    )
    trainer_keep_s: float = Field(
        default=30 * 86_400.0,
        gt=0,
        description="Time without calls after which a trainer is deleted with its checkpoints, in seconds.",
    )
    clusters: dict[ClusterName, ClusterSettings] = Field(
        default_factory=_this_machine,
        description="JSON object of the clusters on which ranks and engines of runs may be placed, by the name that runs use: this machine"
        ' (`{"kind": "local"}`), Slurm, Ray, Kubernetes, or machines that join (docs/clusters.md).',
    )
    cluster_host: str = Field(
        default="127.0.0.1", description="Address at which this service listens to ranks on other machines."
    )
    cluster_port: int = Field(
        default=0, ge=0, le=65535, description="Port for ranks on other machines; 0 selects a free one."
    )
    cluster_advertise_host: str = Field(
        default="",
        max_length=253,
        description="Host at which other machines reach that port; unset: `cluster_host`, or the machine's name where that is a"
        " wildcard.",
    )
    cluster_store_target: str = Field(
        default="",
        max_length=260,
        description="gRPC address at which engines on clusters reach the store; unset: `store_target`.",
    )
    cluster_silence_s: float = Field(
        default=20.0,
        ge=1,
        le=600,
        description="Time without a message after which a machine of a group counts as lost, in seconds.",
    )
    build_deadline_s: float = Field(default=600.0, gt=0, description="Timeout of a model-building script, in seconds.")
    isolation: Isolation = Field(
        default=Isolation.SANDBOX,
        description="Isolation of the code of clients that builds the first weights of a policy: `trusted` (as the service"
        " itself), `process` or `sandbox`; at `container` and `job`, such code is refused (docs/agents.md).",
    )
    sandbox_readable: str = Field(
        default="", description="Further files and folders that sandboxed code may read, separated by commas."
    )
    build_dir: str = Field(
        default="",
        description="Folder for the files of building a policy. Empty: `builds` in the state folder, or where the service is root"
        " and gives the code a user of its own, the system's temporary folder, which that user can reach.",
    )
    build_memory_bytes: int = Field(
        default=64 * 2**30, ge=0, description="Memory limit of building a policy, in bytes; 0: no limit."
    )
    build_disk_bytes: int = Field(
        default=64 * 2**30, ge=2**20, description="Limit of the files of a built policy, each and together, in bytes."
    )
    metric_sinks: str = Field(
        default="tensorboard",
        description="Metric sinks besides the event log, separated by commas: `tensorboard`, `wandb`, `mlflow`.",
    )
    max_concurrent_runs: int = Field(default=2, ge=1, le=64, description="Run slots: maximum number of active runs.")
    project_max_runs: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Maximum number of runs of a project that have not ended; such runs reserve the names of their "
        "policies.",
    )
    keep_checkpoints: int = Field(default=3, ge=2, description="Number of newest checkpoints of a run that are kept.")
    modules: str = Field(
        default="", description="Python files with further algorithms, separated by `:` (docs/extending.md)."
    )
    keep_models: int = Field(
        default=3, ge=1, description="Number of newest published models of a run that are kept, besides the best."
    )

    on_no_signal: Literal["stop", "notice"] = Field(
        default="notice",
        description="Default action if rewards do not differ within any group of a run's first ten steps: `stop` "
        "fails the run, `notice` records a notice.",
    )

    def peer_address(self, port: int) -> str:
        """Returns where the other algorithm services reach this one, which listens on a port."""
        if self.advertise_address:
            return self.advertise_address
        host = socket.gethostname() if self.host in WILDCARD_HOSTS else self.host
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

    def of_weight_agents(self, address: str) -> dict[str, str]:
        """Returns the settings of the weight agents of engines on clusters, by name; `address` is this service's."""
        told: dict[str, object] = {
            "STORE_TARGET": self.cluster_store_target or self.store_target,
            "ALGORITHM_TARGET": address,
            "ENGINE_TOKEN": self.engine_token.get_secret_value(),
        }
        same = ("tls_ca_file", "engine_max_batch_size", "torch_threads", "vllm_command", "vllm_start_deadline_s")
        told |= {name.upper(): getattr(self, name) for name in (*same, "outage_limit_s", "otlp_endpoint")}
        return {name: str(value) for name, value in told.items()}

    @property
    def known_exchange_targets(self) -> frozenset[str]:
        """Addresses of services through which ranks of runs may exchange gradients."""
        return frozenset({*self.exchange_targets, f"127.0.0.1:{self.port}"})

    @field_validator("metric_sinks")
    @classmethod
    def _known_sinks(cls, value: str) -> str:
        if unknown := {name.strip() for name in value.split(",") if name.strip()} - set(SINK_NAMES):
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SINK_NAMES)}")
        return value

    @model_validator(mode="after")
    def _has_token(self) -> Self:
        if not self.dev_mode and not self.token.get_secret_value():
            raise ValueError("token is required (`fulmen token issue --role service`)")
        return self

    @model_validator(mode="after")
    def _engines_guarded(self) -> Self:
        if not is_loopback(self.engine_host) and not self.engine_token.get_secret_value():
            raise ValueError("engine_token is required, because engine_host can be reached from other machines")
        if self.max_engines < self.max_concurrent_runs:
            raise ValueError("max_engines must be at least max_concurrent_runs")
        return self
