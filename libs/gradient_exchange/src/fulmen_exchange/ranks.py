"""The group of ranks that train together, and what passes between a training loop and a reducer of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fulmen_exchange.way_out import WayOut

Value = TypeVar("Value")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: Number of this process, from 0. Rank 0 writes files and answers.
        world_size: Number of processes.
        device: Device on which this rank computes.
        group: Process group of the ranks; None for a single process.
        way_out: Way out of its collectives; None if they are waited for whatever happens.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None
    way_out: WayOut | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in order of rank, on every rank."""
        if self.group is None:
            return [value]
        # Ranks of one run trust each other, so pickle is acceptable here.
        gathered: list[Any] = [None] * self.world_size
        self.run(lambda: dist.all_gather_object(gathered, value, group=self.group))
        return cast(list[Value], gathered)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place."""
        if self.group is not None:
            self.run(lambda: dist.all_reduce(tensor, group=self.group))
        return tensor

    def run(self, collective: Callable[[], object]) -> None:
        """Runs a collective of the group.

        Raises:
            RanksLost: if ranks are lost, and there is a way out.
        """
        if self.way_out is None:
            collective()
        else:
            self.way_out.run(collective)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """The step whose gradients are summed.

    Attributes:
        progress: Completed share of the run, 0 to 1; 0 if unknown.
        metric: Mean reward of the step's rows, the same on every rank; None if they have none.
        compute_s: Seconds of this rank's passes.
    """

    progress: float = 0.0
    metric: float | None = None
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeReport:
    """Metrics and events of the rounds since the last report, the same on every rank except for seconds and bytes.

    Attributes:
        metrics: Values by name (`exchange_*`), for the stream of the run.
        events: Texts for the history of the run.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()
