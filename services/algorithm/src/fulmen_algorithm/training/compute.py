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
        """Number of processes: 1."""
        return 1


class Ddp(Strict):
    """Every rank holds all weights and computes a part of each step; gradients are summed once per step.

    Attributes:
        ranks: Number of processes; on GPUs, one per GPU.
    """

    kind: Literal["ddp"] = "ddp"
    ranks: int = Field(default=2, ge=1, le=MAX_RANKS)


class Fsdp2(Strict):
    """Every rank holds a shard of the weights, the gradients and the optimiser state.

    Attributes:
        ranks: Number of processes; on GPUs, one per GPU.
        reshard_after_forward: Frees the gathered weights of a layer between its forward and its backward pass: less
            memory, one more all-gather.

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
    """Processes and precision of training; results are equal up to rounding.

    Attributes:
        parallel: One process, or a group of ranks.
        precision: `auto` is bf16 on GPUs and fp32 on CPUs.
        gradient_checkpointing: Recomputes the activations of each layer in the backward pass instead of storing them.
    """

    parallel: ParallelSettings = OneProcess()
    precision: Annotated[Precision, Field(strict=False)] = Precision.AUTO
    gradient_checkpointing: bool = False
