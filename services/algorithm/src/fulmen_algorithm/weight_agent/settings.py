"""Settings of a weight agent, from variables that begin with `FULMEN_WEIGHT_AGENT_`."""

import re
import socket
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from fulmen_service_kit.settings import ServiceSettings, is_loopback, settings_config

MAX_ID = 32
_NOT_IN_IDS = re.compile(r"[^a-z0-9-]+")


class WeightAgentSettings(ServiceSettings):
    """Connections of a weight agent, and its engine."""

    model_config = settings_config("FULMEN_WEIGHT_AGENT_")
    service_name: ClassVar[str] = "weight_agent"

    store_target: str = Field(default="127.0.0.1:7101", description="gRPC address of the store.")
    algorithm_target: str = Field(default="127.0.0.1:7301", description="gRPC address of the algorithm service.")
    token: SecretStr = Field(
        default=SecretStr(""),
        description="Token of role `engine`, which names the training run (`fulmen token issue --role engine`). Secret.",
    )
    state_dir: Path = Field(
        default=Path(".fulmen/weight-agent"), description="Folder for weights; the newest few versions are kept."
    )
    engine_id: str = Field(
        default="",
        pattern=r"^[a-z0-9-]{0,32}$",
        description="Id of the engine, unique in the run; unset: the machine's name.",
    )
    engine_host: str = Field(default="127.0.0.1", description="Address that the engine binds to.")
    engine_advertise_host: str = Field(
        default="127.0.0.1", description="Host under which the LLM proxy reaches the engine."
    )
    engine_port: int = Field(default=8000, ge=0, le=65535, description="Port of the engine; 0 selects a free one.")
    engine_token: SecretStr = Field(
        default=SecretStr(""),
        description="Token that the engine requires: the deployment's engine token, the entry `engine` of the proxy's"
        " `backend_keys`. Secret.",
    )
    engine_max_batch_size: int = Field(default=64, ge=1, description="Maximum batch size of generation, in requests.")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Device of the engine.")
    torch_threads: int = Field(default=1, ge=1, le=1024, description="Threads of one torch operation.")
    vllm_command: str = Field(
        default="vllm", min_length=1, description="The vLLM program, for runs whose engine is `vllm`."
    )
    vllm_start_deadline_s: float = Field(default=600.0, gt=0, description="Start timeout of vLLM, in seconds.")
    outage_limit_s: float = Field(
        default=1800.0, gt=0, description="Time without the algorithm service after which the agent ends, in seconds."
    )

    @property
    def own_engine_id(self) -> str:
        """The engine's id."""
        name = _NOT_IN_IDS.sub("-", socket.gethostname().lower()).strip("-")
        # Machines differ in how a long name begins, pods in how it ends.
        return self.engine_id or (name if len(name) <= MAX_ID else f"{name[:15]}-{name[-16:]}") or "engine"

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not self.dev_mode and not self.token.get_secret_value():
            raise ValueError("token is required (`fulmen token issue --role engine`)")
        if not is_loopback(self.engine_host) and not self.engine_token.get_secret_value():
            raise ValueError("engine_token is required, because engine_host can be reached from other machines")
        return self
