"""An outer loop between sites: each takes steps of its own optimiser, and the change of the weights is exchanged.

    outer = OuterLoop(model, optimizer, "topk_quantised", sync_every=50, link="grpc://aggregator:7301", ranks=ranks)
    for rows in data:
        loss(model, rows).backward()
        optimizer.step()  # every 50th is followed by an exchange
    outer.close()

Sources: DiLoCo, arXiv:2311.08105; SparseLoCo, arXiv:2508.15706. See `fulmen_exchange.outer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from fulmen_exchange.links.grpc_link import GrpcLink
from fulmen_exchange.links.opening import open_link
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.ranks import ExchangeReport, Ranks
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import settings_of

GRPC = "grpc://"
SEED = 0
"""Seed of random numbers, which also differ by rank and round."""
ACCESS = ServerAccess(training_run="projects/default/trainingRuns/outer")


class OuterLoop:
    """The outer loop of one site."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        codec: str,
        *,
        sync_every: int = 30,
        link: str = "torch",
        ranks: Ranks | None = None,
        access: ServerAccess = ACCESS,
        **settings: Any,
    ) -> None:
        """Joins the other sites. All of them call this, with the same arguments but for `ranks`, and with the same weights.

        Args:
            model: Model of this site; each process has all of it, or DDP sums its gradients within the site.
            optimizer: Its optimiser, of any kind.
            codec: Name of the codec; not `dgc`, which needs the gradients of every step.
            sync_every: Steps of the optimiser between exchanges.
            link: `torch` for a process group, or `grpc://host:port`, one or several separated by commas, for servers of shards.
            ranks: This process among those that exchange; None for all of the default process group.
            access: Run that identifies the exchange at servers, and credentials.
            settings: Settings of the codec; `outer` may have learning rate, momentum and decay of the outer step.

        Raises:
            ValidationError: if the settings are invalid.
            ExchangeFailed: if a server refuses the rank or cannot be reached within the deadline.
        """
        if link.startswith(GRPC):
            settings = {"link": {"kind": "grpc", "targets": link.removeprefix(GRPC).split(",")}, **settings}
        elif link != "torch":
            raise ValueError(f"link is {link!r}, must be torch or {GRPC}host:port")
        outer = {"kind": "outer", "steps": sync_every, **settings.pop("outer", {})}
        found = settings_of(codec, outer=outer, **settings)
        whole = model.module if isinstance(model, DistributedDataParallel) else model
        named = {name: each for name, each in whole.named_parameters() if each.requires_grad}
        self._ranks = ranks or _default_ranks(next(iter(named.values())))
        self._link = open_link(found, parameters=named, ranks=self._ranks, access=access)
        self._reducer = CodecReducer.open(
            found,
            parameters=named,
            link=self._link,
            seed=SEED,
            optimizer="sgd" if isinstance(optimizer, SGD) else "adamw",
        )
        self._hook = optimizer.register_step_post_hook(lambda *_: self._reducer.on_step())

    @property
    def rounds(self) -> int:
        """Number of completed exchanges."""
        return self._reducer.rounds

    def synchronize(self) -> None:
        """Exchanges now if any step was taken, so that all sites hold the same weights: before a validation or a checkpoint."""
        self._reducer.synchronize()

    def drain(self) -> ExchangeReport:
        """Returns metrics and events since the last call."""
        return self._reducer.drain()

    def state(self) -> dict[str, Any]:
        """Returns this site's state, to be stored in a checkpoint with the weights."""
        return self._reducer.state()

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of all sites, after the weights.

        Raises:
            ResidualsInvalid: if they belong to another model or version.
            PolicyStateInvalid: if they belong to another policy.
            OuterStateInvalid: if they belong to another outer loop.
        """
        self._reducer.restore(states)

    def close(self) -> None:
        """Leaves the other sites."""
        self._hook.remove()
        if isinstance(self._link, GrpcLink):
            self._link.close()

    def __enter__(self) -> Self:
        """Returns the loop."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the other sites."""
        self.close()


def _default_ranks(like: nn.Parameter) -> Ranks:
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=like.device, group=dist.group.WORLD)
