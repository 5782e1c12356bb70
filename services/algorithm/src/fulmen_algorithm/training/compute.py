"""Compute settings: number of ranks, how they share the work, and precision. Importable without torch."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.training.strict import Strict

MAX_RANKS = 1024


class OneProcess(Strict):
    """Training is done by the service's own process."""

    kind: Literal["none"] = "none"

    @property
    def ranks(self) -> int:
        """The process itself."""
        return 1


class Ddp(Strict):
    """Every rank holds all weights and computes a part of each step; gradients are summed once per step.

    Attributes:
        ranks: Processes; on GPUs one for each.
    """

    kind: Literal["ddp"] = "ddp"
    ranks: int = Field(default=2, ge=1, le=MAX_RANKS)


class Fsdp2(Strict):
    """Every rank holds a part of the weights, of their gradients and of the optimiser's moments.

    Attributes:
        ranks: Processes; on GPUs one for each.
        reshard_after_forward: Gives the gathered weights of a layer up between its forward and its backward pass: less
            memory, and one more gathering.

    Source: fully sharded data parallel, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`.
    """

    kind: Literal["fsdp2"] = "fsdp2"
    ranks: int = Field(default=2, ge=1, le=MAX_RANKS)
    reshard_after_forward: bool = True


ParallelSettings = Annotated[OneProcess | Ddp | Fsdp2, Field(discriminator="kind")]


class Precision(StrEnum):
    """Precision of forward and backward passes; weights, moments and log-probabilities are always float32."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


class ComputeSettings(Strict):
    """Where and how a policy is trained; results are the same up to rounding.

    Attributes:
        parallel: One process, or a group of ranks.
        precision: `auto` is bf16 on GPUs and fp32 on CPUs.
        gradient_checkpointing: Computes each layer's inside again in the backward pass instead of keeping it.
    """

    parallel: ParallelSettings = OneProcess()
    precision: Annotated[Precision, Field(strict=False)] = Precision.AUTO
    gradient_checkpointing: bool = False
