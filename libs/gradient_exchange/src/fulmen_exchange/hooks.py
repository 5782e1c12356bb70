"""Torch's own `DistributedDataParallel` (DDP), its gradients summed through a codec.

    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register(model, DgcSettings(ratio=100), optimizer=optimizer, seed=0)

DDP calls a hook for each of its buckets, in the same order on every rank, and wants the averages back as futures. Here
nothing is sent before the last bucket of a backward pass has come; then all gradients go through `CodecReducer` at once,
in its own buckets. Invariants: every rank calls collectives from that one place, never from a future's callback, whose
order is any (which is what aborts torch's PowerSGD hook on Gloo); what is kept back belongs to parameters, wherever DDP
puts them, which it changes after the first pass; and a rank clips to the norm of all its gradients, as codecs ask for.
The price is that sums do not overlap with the backward pass.
"""

# Annotations are no strings here: DDP compares those of a hook with classes.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.settings import CodecSettings, EveryStep, TorchLinkSettings


class HookUnsupported(Exception):
    """A model, or what it is trained with, cannot have this hook; the text says what to use instead."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A bucket of DDP whose sum is still to come.

    Attributes:
        average: What DDP waits for.
        buffer: The gradients of its parameters, one after another; becomes the average.
        parameters: Those of the model.
        gradients: Of each; views of the buffer.
        filled: On a GPU, when they are there: each bucket may come in a stream of its own.
    """

    average: Future[Tensor]
    buffer: Tensor
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    filled: torch.cuda.Event | None


class ExchangeHook:
    """What DDP calls on one rank. Made by `register`.

    Attributes:
        step_info: What the settings' policy is told of the next step; to be set before its backward pass, alike on every
            rank, where the policy asks for progress or a metric. Seconds of passes are measured.
    """

    def __init__(self, model: DistributedDataParallel, settings: CodecSettings, *, optimizer: str, seed: int) -> None:
        """See `register`; the optimiser by its kind, as for `CodecReducer.open`."""
        self.step_info = StepInfo()
        self._model = model
        trained = _trained_by(model)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        # With the model's weights, and gradients of their own: those of the model stay as DDP wants them.
        self._stand_ins = {name: nn.Parameter(parameter.detach()) for name, parameter in trained.items()}
        group, device = model.process_group, next(iter(trained.values())).device
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = Ranks(rank=rank, world_size=world_size, device=device, group=group)
        link = TorchLink(self._ranks)
        self._reducer = CodecReducer.open(
            settings, parameters=self._stand_ins, link=link, seed=seed, optimizer=optimizer
        )
        self._waiting: list[_Waiting] = []
        self._ended: float | None = None

    @property
    def rounds(self) -> int:
        """How many rounds there were; steps whose gradients were not finite have none."""
        return self._reducer.rounds

    def drain(self) -> ExchangeReport:
        """Returns what there is to tell since it was last asked."""
        return self._reducer.drain()

    def state(self) -> dict[str, Any]:
        """Returns what this rank goes on from: tensors, numbers and texts, for a checkpoint with the weights."""
        return self._reducer.state()

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from the states of all ranks that there were; bit for bit with as many ranks as now.

        Raises:
            ResidualsInvalid: if they are of another model, or were stored by another version.
            PolicyStateInvalid: if they are of another policy.
        """
        self._reducer.restore(states)

    def receive(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]  # not in stubs
        """Is what DDP calls for each bucket; the last one begins the exchange.

        Raises:
            RanksDiverged: if the ranks do not hold the same weights any more.
        """
        if not bucket.index():
            self._waiting.clear()  # a pass before this one may have been broken off
        buffer, cuda = bucket.buffer(), self._ranks.device.type == "cuda"
        waiting = _Waiting(
            average=Future(devices=[buffer.device] if cuda else None),
            buffer=buffer,
            parameters=bucket.parameters(),
            gradients=bucket.gradients(),
            filled=torch.cuda.current_stream(buffer.device).record_event() if cuda else None,
        )
        self._waiting.append(waiting)
        if bucket.is_last():
            self._exchange()
        return waiting.average

    def _exchange(self) -> None:
        """Sums what waits, and gives DDP the averages."""
        for waiting in self._waiting:
            if waiting.filled is not None:
                torch.cuda.current_stream(self._ranks.device).wait_event(waiting.filled)
        unused = self._unused_here()
        for waiting in self._waiting:
            # Before the sum: a rank's part of the average is what codecs clip.
            waiting.buffer.div_(self._ranks.world_size)
            for parameter, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
                self._stand_ins[self._names[parameter]].grad = gradient
        step_info = replace(self.step_info, compute_s=self._compute_s())
        self._reducer.reduce(list(self._stand_ins.values()), self._ranks, step_info)
        for waiting in self._waiting:
            for parameter, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
                sum_ = self._stand_ins[self._names[parameter]].grad
                gradient.zero_() if sum_ is None else gradient.copy_(sum_)
        self._keep_late(unused)
        for waiting in self._waiting:
            waiting.average.set_result(waiting.buffer)
        self._waiting.clear()
        for stand_in in self._stand_ins.values():
            stand_in.grad = None
        self._ended = perf_counter()

    def _compute_s(self) -> float:
        """Returns the seconds since the last exchange; 0 before the first."""
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream(self._ranks.device).synchronize()
        return 0.0 if self._ended is None else perf_counter() - self._ended

    def _unused_here(self) -> list[tuple[Tensor, Tensor]]:
        """Returns parameters, with their gradients, that DDP may find to have none on any rank."""
        if not (self._model.find_unused_parameters or self._model.static_graph):
            return []
        pairs = ((p, g) for one in self._waiting for p, g in zip(one.parameters, one.gradients, strict=True))
        return [(parameter, gradient) for parameter, gradient in pairs if not bool(gradient.any())]

    def _keep_late(self, unused: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Gives what was kept back of unused parameters, and is sent now, to the optimiser.

        DDP leaves the gradients of those alone that no rank has used in the step; all others it sets itself, to the same.
        """
        for parameter, average in unused:
            if not bool(average.any()):
                continue
            if parameter.grad is not None:
                parameter.grad.copy_(average)
            else:
                parameter.grad = average if self._model.gradient_as_bucket_view else average.clone()


def register(model: nn.Module, settings: CodecSettings, *, optimizer: Optimizer, seed: int) -> ExchangeHook:
    """Has a model's gradients summed through a codec, on all ranks of its process group, which all call this.

    Before the first backward pass, with the same settings and seed on every rank. What DDP gives the optimiser is the
    average over the ranks, as without a hook. With a `GradScaler` use a codec that keeps nothing back (`bf16`, `qsgd`):
    what is kept back would be of another scale than what it is added to.

    Args:
        model: `DistributedDataParallel`, on Gloo or NCCL.
        settings: Of the codec, and what goes with it.
        optimizer: Of the model; what some codecs keep back goes with SGD alone.
        seed: Of what is random.

    Raises:
        HookUnsupported: if the model is no DDP, or cannot be trained so.
    """
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        raise HookUnsupported(
            "FSDP sums gradients in its own reduce-scatter, which leaves no rank all of them for a codec: train with"
            " DistributedDataParallel, or let FSDP sum in bfloat16 (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
        )
    if not isinstance(model, DistributedDataParallel):
        raise HookUnsupported(f"{type(model).__name__} is not wrapped in DistributedDataParallel")
    if problems := _problems(model, settings, optimizer):
        raise HookUnsupported("; ".join(problems))
    hook = ExchangeHook(model, settings, optimizer="sgd" if isinstance(optimizer, SGD) else "adamw", seed=seed)
    model.register_comm_hook(None, hook.receive)
    return hook


def _problems(model: DistributedDataParallel, settings: CodecSettings, optimizer: Optimizer) -> list[str]:
    """Says why a model cannot be trained so."""
    found = []
    if not isinstance(settings.link, TorchLinkSettings):
        found.append("link: the ranks of DDP exchange through its process group: kind torch")
    if not isinstance(settings.outer, EveryStep):
        found.append("outer: DDP sums the gradients of every step; for many steps of its own a rank needs no DDP")
    if settings.sgd_only and not isinstance(optimizer, SGD):
        found.append(
            f"{settings.name} needs SGD: qsgd, bf16 and double_quantization go with {type(optimizer).__name__}"
        )
    if settings.holds_momentum and any(group.get("momentum") for group in optimizer.param_groups):
        found.append(f"the optimiser's momentum must be 0: {settings.name} has the momentum")
    if model.mixed_precision is not None:
        found.append("mixed_precision of DDP is not supported: use torch.autocast")
    sparse = (nn.Embedding, nn.EmbeddingBag)
    if any(isinstance(part, sparse) and part.sparse for part in model.module.modules()):
        found.append("embeddings with sparse=True have gradients that codecs cannot take")
    return found


def _trained_by(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Returns the parameters whose gradients DDP sums, by name."""
    named = model.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore}
