"""Settings of the algorithm service, from variables that begin with `FULMEN_ALGORITHM_`."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from fulmen_service_kit.settings import ServiceSettings, is_loopback, settings_config

ALGORITHM_PORT = 7301
METRICS_PORT = 7302


class AlgorithmServiceSettings(ServiceSettings):
    """Where the service keeps its runs, whom it talks to, and how it serves the policy."""

    model_config = settings_config("FULMEN_ALGORITHM_")
    service_name: ClassVar[str] = "algorithm"

    port: int = Field(default=ALGORITHM_PORT, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    metrics_port: int = Field(
        default=METRICS_PORT, ge=0, le=65535, description="Port of /metrics over HTTP; 0 takes a free one."
    )
    state_dir: Path = Field(default=Path(".fulmen/algorithm"), description="Folder of the runs; survives restarts.")
    store_target: str = Field(default="127.0.0.1:7101", description="gRPC address of the store.")
    llm_proxy_target: str = Field(default="127.0.0.1:7201", description="gRPC address of the LLM proxy.")
    token: SecretStr = Field(
        default=SecretStr(""),
        description="Token of role `service` for the store and the proxy; empty: made with `signing_key`. Secret.",
    )
    outage_limit_s: float = Field(
        default=1800.0, gt=0, description="How long a run waits for another service before it fails, seconds."
    )
    engine_host: str = Field(default="127.0.0.1", description="Address that the generation engine binds to.")
    engine_advertise_host: str = Field(
        default="127.0.0.1", description="Host under which the proxy reaches the engine."
    )
    engine_port: int = Field(default=0, ge=0, le=65535, description="Port of the engine; 0 takes a free one.")
    engine_token: SecretStr = Field(
        default=SecretStr(""),
        description="Token that the engine asks for, and the proxy's `backend_keys` entry `engine`. Secret.",
    )
    engine_backend: str = Field(
        default="engine", pattern=r"^[a-z0-9._-]{1,63}$", description="Id of the engine's backend at the proxy."
    )
    engine_max_batch_size: int = Field(default=64, ge=1, description="Requests that are generated together.")
    engine_in_process: bool = Field(
        default=False, description="Runs the engine inside the service, where a debugger reaches it; not for training."
    )
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Device of training and engine.")
    torch_threads: int = Field(default=1, ge=1, le=1024, description="Threads of one torch operation.")
    build_deadline_s: float = Field(default=600.0, gt=0, description="Limit of a model-building script, seconds.")
    keep_checkpoints: int = Field(default=3, ge=1, description="Newest checkpoints of a run that are kept.")
    keep_models: int = Field(default=3, ge=1, description="Newest published models of a run kept, beside the best.")

    @model_validator(mode="after")
    def _engine_guarded(self) -> Self:
        if not is_loopback(self.engine_host) and not self.engine_token.get_secret_value():
            raise ValueError("engine_token is needed, because engine_host can be reached from other machines")
        return self
