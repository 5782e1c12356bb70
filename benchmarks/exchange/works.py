"""How each contender takes a step: the same model, passes, clipping and optimiser, and an exchange of its own between."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange import peers
from benchmarks.exchange.contenders import By, Contender
from benchmarks.exchange.lines import Place
from benchmarks.exchange.model import Transformer, made
from fulmen_exchange.hooks import register
from fulmen_exchange.links.grpc_link import GrpcLink
from fulmen_exchange.links.opening import open_link
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import load_codecs

RATE, MOMENTUM = 1e-3, 0.9
DEADLINES = {"straggler_timeout_s": 240.0, "deadline_s": 300.0}
SEED = 7


def sgd(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    """Makes the optimiser that all have."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)


class Work:
    """A model, its optimiser, and how its gradients are exchanged; this one exchanges nothing.

    Attributes:
        module: Maps rows to their loss.
        parameters: That train.
        optimizer: SGD with momentum; without where the codec holds it.
        share: Factor of the loss, so that the exchange yields the mean over all rows.
        is_shared: Whether all ranks hold the same weights.
    """

    share = 1.0
    is_shared = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.module = model
        self.parameters = list(model.parameters())
        self.optimizer = optimizer or sgd(model, MOMENTUM)

    def exchange(self, compute_s: float) -> bool:
        """Exchanges gradients, if that is not done yet; tells whether what came is to be clipped to a norm."""
        return True

    def on_step(self) -> None:
        """Is told that a step was taken."""

    def take(self) -> ExchangeReport:
        """Returns what there is to tell of the exchange."""
        return ExchangeReport()

    def close(self) -> None:
        """Ends what is open."""


class Peer(Work):
    """Exchanges during the backward pass, in PyTorch's DDP."""

    is_shared = True

    def __init__(self, what: str) -> None:
        super().__init__(peers.wrapped(made(), what))


@dataclass(slots=True)
class Shared:
    """What all codecs of the package share: a model, the same on all ranks whoever has exchanged its gradients.

    Attributes:
        model: It.
        optimizers: Of it, by momentum.
    """

    model: Transformer = field(default_factory=made)
    optimizers: dict[float, torch.optim.Optimizer] = field(default_factory=dict)

    def optimizer(self, momentum: float) -> torch.optim.Optimizer:
        """Returns the one of a momentum."""
        if momentum not in self.optimizers:
            self.optimizers[momentum] = sgd(self.model, momentum)
        return self.optimizers[momentum]


class Ours(Work):
    """Exchanges as trainers of the algorithm service do."""

    is_shared = True

    def __init__(self, contender: Contender, shared: Shared, ranks: Ranks, place: Place) -> None:
        given = dict(contender.settings)
        if contender.link == "grpc":
            given["link"] = {"kind": "grpc", "targets": place.targets, **DEADLINES}
        settings = load_codecs()[contender.codec].settings.model_validate(given)
        super().__init__(shared.model, shared.optimizer(0.0 if settings.holds_momentum else MOMENTUM))
        self.share = 1.0 / ranks.world_size
        self._ranks = ranks
        named = {name: each for name, each in shared.model.named_parameters() if each.requires_grad}
        access = ServerAccess(training_run=f"projects/default/trainingRuns/{contender.codec}", token=place.token)
        self._link = open_link(settings, parameters=named, ranks=ranks, access=access)
        self._reducer = CodecReducer.open(settings, parameters=named, link=self._link, seed=SEED, optimizer="sgd")

    def exchange(self, compute_s: float) -> bool:
        """See `Work`."""
        self._reducer.reduce(self.parameters, self._ranks, StepInfo(compute_s=compute_s))
        return self._reducer.clips_sums

    def on_step(self) -> None:
        """See `Work`."""
        self._reducer.on_step()

    def take(self) -> ExchangeReport:
        """See `Work`."""
        return self._reducer.drain()

    def close(self) -> None:
        """See `Work`."""
        if isinstance(self._link, GrpcLink):
            self._link.close()


class Hooked(Work):
    """Exchanges in the package's hook of PyTorch's DDP."""

    is_shared = True

    def __init__(self, contender: Contender) -> None:
        settings = load_codecs()[contender.codec].settings.model_validate(dict(contender.settings))
        model = DistributedDataParallel(made())
        super().__init__(model, sgd(model, 0.0 if settings.holds_momentum else MOMENTUM))
        self._clips = not settings.holds_momentum
        self._hook = register(model, settings, optimizer=self.optimizer, seed=SEED, overlap=contender.overlap)

    def exchange(self, compute_s: float) -> bool:
        """See `Work`: it was in the backward pass."""
        return self._clips

    def take(self) -> ExchangeReport:
        """See `Work`."""
        return self._hook.drain()


class Works:
    """The works of a rank, each opened when it is first asked for, by all ranks in the same order."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ranks = Ranks(rank=place.rank, world_size=place.world_size, group=dist.group.WORLD)
        self._open: dict[str, Work] = {}
        self._shared = Shared()

    def of(self, contender: Contender) -> Work:
        """Returns the work of a contender; those of DDP, which has hooks in it, have a model of their own."""
        if contender.name not in self._open:
            self._open[contender.name] = self._opened(contender)
        return self._open[contender.name]

    def _opened(self, contender: Contender) -> Work:
        match contender.by:
            case By.NOBODY:
                return Work(made())
            case By.PYTORCH:
                return Peer(contender.codec)
            case By.FULMEN if contender.hook:
                return Hooked(contender)
            case By.FULMEN:
                return Ours(contender, self._shared, self._ranks, self._place)

    def close(self) -> None:
        """Ends what is open."""
        for work in self._open.values():
            work.close()
