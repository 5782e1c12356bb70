"""Settings of `fulmen-rank`, from variables that begin with `FULMEN_RANK_`."""

import re
import socket
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from fulmen_algorithm.training.compute import MAX_RANKS
from fulmen_service_kit.settings import ServiceSettings, settings_config

_NOT_IN_NODES = re.compile(r"[^A-Za-z0-9_.-]+")


class RankAgentSettings(ServiceSettings):
    """Connections of a machine, and what it offers."""

    model_config = settings_config("FULMEN_RANK_")
    service_name: ClassVar[str] = "rank"

    store_target: str = Field(default="127.0.0.1:7101", description="gRPC address of the store.")
    algorithm_target: str = Field(default="127.0.0.1:7301", description="gRPC address of the algorithm service.")
    token: SecretStr = Field(
        default=SecretStr(""),
        description="Token of role `rank`, which names the training run (`fulmen token issue --role rank`). Secret.",
    )
    node: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.-]{0,64}$",
        description="Name of the machine, unique in the run; unset: its host name.",
    )
    ranks: int = Field(
        default=1, ge=1, le=MAX_RANKS, description="Number of ranks that the machine runs; on GPUs, one per GPU."
    )
    device: str = Field(
        default="cpu",
        pattern="^(cpu|cuda)$",
        description="Whether the ranks are on GPUs (`cuda`): those that CUDA_VISIBLE_DEVICES names, if it is set.",
    )
    warm_start: bool = Field(
        default=True,
        description="Whether ranks are forked from a process that has torch loaded, and starts with this one. Linux only.",
    )
    files_dir: Path | None = Field(
        default=None,
        description="Folder for files of the run that are sent to this machine: models and a checkpoint. Files that "
        "remain there after a restart are not sent again. Unset: a temporary folder.",
    )
    outage_limit_s: float = Field(
        default=1800.0, gt=0, description="Time without the algorithm service after which it ends, in seconds."
    )

    @property
    def own_node(self) -> str:
        """The machine's name."""
        return self.node or _NOT_IN_NODES.sub("-", socket.gethostname())[:64] or "machine"

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not self.dev_mode and not self.token.get_secret_value():
            raise ValueError("token is required (`fulmen token issue --role rank`)")
        return self
