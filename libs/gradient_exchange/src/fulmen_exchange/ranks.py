"""The ranks that train together, and what a reducer of their gradients is told and tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: Its number, from 0; rank 0 writes files and answers.
        world_size: How many there are.
        device: Where this rank computes.
        group: Through which they talk; None for a single process.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Tells whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Collects a value of each rank, in order of rank; every rank gets all of them."""
        if self.group is None:
            return [value]
        # Between ranks of one run alone: they trust each other, and pickle takes whatever they measure.
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return cast(list[Value], gathered)

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds the tensors of all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What a reducer is told of the step whose gradients it sums.

    Attributes:
        progress: Share of the run that is done, 0 to 1; 0 where nobody knows.
        metric: Mean reward of the step's rows; None where they have none. The same on every rank.
        compute_s: Seconds of this rank's passes.
    """

    progress: float = 0.0
    metric: float | None = None
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeReport:
    """What an exchange has to tell, the same on every rank but for seconds and bytes.

    Attributes:
        metrics: Numbers by name (`exchange_*`), for the stream of the run.
        events: Texts for the history of the run.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()
