"""A communication hook for torch's `DistributedDataParallel` (DDP) that sums gradients through a codec.

    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register(model, "dgc", ratio=100, optimizer=optimizer)

DDP calls a hook for each of its buckets, in the same order on every rank, and expects the averages as futures. Nothing is sent
before the last bucket of a backward pass is ready; then all gradients are passed to `CodecReducer` together, in its own
buckets. With `overlap` each of these is summed as soon as it is whole (see `overlap`). Invariants: collectives are called from
one place, never from a future's callback, whose order is undefined (which aborts torch's PowerSGD hook on Gloo); residuals
belong to parameters, whose buckets DDP rearranges after the first pass; and without `overlap` a rank clips to the norm of all
its gradients, as codecs require.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with classes.

from collections.abc import Callable, Sequence
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

from fulmen_exchange.errors import HookUnsupported
from fulmen_exchange.links.settings import TorchLinkSettings
from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.overlap import OverlappedRounds, apart, overlap_problems
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import settings_of
from fulmen_exchange.settings import CodecSettings, EveryStep, optimizer_problems


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A DDP bucket that waits for its sum.

    Attributes:
        average: Future that DDP waits for.
        buffer: Gradients of its parameters, one after another; overwritten by the average.
        parameters: Parameters of the model.
        gradients: Gradient of each parameter; views of the buffer.
        filled: Event recorded once the gradients are ready; None on a CPU. Each bucket may arrive in its own stream.
    """

    average: Future[Tensor]
    buffer: Tensor
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    filled: torch.cuda.Event | None


class ExchangeHook:
    """The hook of one rank. Created by `register`.

    Attributes:
        step_info: Input of the policy. If the policy needs progress or a metric, set it before the backward pass, to the same
            value on every rank. Seconds of passes are measured.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: CodecSettings,
        *,
        optimizer: str,
        seed: int,
        loss_scale: Callable[[], float],
        overlap: bool,
    ) -> None:
        """See `register`; `optimizer` is its kind, as for `CodecReducer.open`."""
        self.step_info = StepInfo()
        self._loss_scale = loss_scale
        self._model = model
        trained = _trained_by(model)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        # They share the model's weights but have gradients of their own, since DDP owns those of the model.
        self._stand_ins = {name: nn.Parameter(parameter.detach()) for name, parameter in trained.items()}
        group, device = model.process_group, next(iter(trained.values())).device
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ranks = Ranks(rank=rank, world_size=world_size, device=device, group=group)
        self._ranks = apart(ranks) if overlap else ranks
        link = TorchLink(self._ranks)
        self._reducer = CodecReducer.open(
            settings, parameters=self._stand_ins, link=link, seed=seed, optimizer=optimizer
        )
        self._overlapped = OverlappedRounds(self._reducer) if overlap else None
        self._is_begun = False  # the round, before all of its gradients are there
        self._scale = 1.0
        self._waiting: list[_Waiting] = []
        self._ended: float | None = None

    @property
    def rounds(self) -> int:
        """Number of completed rounds; steps with gradients that are not finite have none."""
        return self._reducer.rounds

    def drain(self) -> ExchangeReport:
        """Returns metrics and events since the last call."""
        return self._reducer.drain()

    def state(self) -> dict[str, Any]:
        """Returns this rank's state, to be stored in a checkpoint with the weights."""
        return self._reducer.state()

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of all ranks; exact with the same number of ranks.

        Raises:
            ResidualsInvalid: if they belong to another model or version.
            PolicyStateInvalid: if they belong to another policy.
        """
        self._reducer.restore(states)

    def receive(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Receives a bucket from DDP; the last one ends the exchange, and starts it unless it overlaps with the pass.

        Raises:
            RanksDiverged: if the ranks no longer hold the same weights.
        """
        if not bucket.index():
            self._waiting.clear()  # an earlier pass may have been aborted
            self._scale = self._loss_scale()
            self._is_begun = self._overlapped is not None and self._overlapped.begin()
        buffer, cuda = bucket.buffer(), self._ranks.device.type == "cuda"
        waiting = _Waiting(
            average=Future(devices=[buffer.device] if cuda else None),
            buffer=buffer,
            parameters=bucket.parameters(),
            gradients=bucket.gradients(),
            filled=torch.cuda.current_stream(buffer.device).record_event() if cuda else None,
        )
        self._waiting.append(waiting)
        if self._overlapped is not None and self._is_begun:
            names = [self._names[parameter] for parameter in waiting.parameters]
            self._overlapped.add(names, lambda: self._prepare(waiting))
        if bucket.is_last():
            self._exchange()
        return waiting.average

    def _exchange(self) -> None:
        """Sums the waiting buckets and completes their futures."""
        for waiting in self._waiting:
            if waiting.filled is not None:
                torch.cuda.current_stream(self._ranks.device).wait_event(waiting.filled)
        unused, step_info = self._unused_here(), replace(self.step_info, compute_s=self._compute_s())
        if self._overlapped is not None and self._is_begun:
            self._overlapped.complete(step_info)
        else:
            for waiting in self._waiting:
                self._prepare(waiting)
            self._reducer.reduce(list(self._stand_ins.values()), self._ranks, step_info)
        for waiting in self._waiting:
            for parameter, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
                sum_ = self._stand_ins[self._names[parameter]].grad
                gradient.zero_() if sum_ is None else torch.mul(sum_, self._scale, out=gradient)
        self._keep_late(unused)
        for waiting in self._waiting:
            waiting.average.set_result(waiting.buffer)
        self._waiting.clear()
        for stand_in in self._stand_ins.values():
            stand_in.grad = None
        self._ended = perf_counter()

    def _prepare(self, waiting: _Waiting) -> None:
        """Gives the gradients of a bucket to the reducer, as parts of the average and without the scale of the loss."""
        # Before the sum: codecs clip each rank's part of the average, and add residuals of earlier scales.
        waiting.buffer.div_(self._ranks.world_size * self._scale)
        for parameter, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
            self._stand_ins[self._names[parameter]].grad = gradient

    def _compute_s(self) -> float:
        """Returns the seconds since the last exchange; 0 before the first."""
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream(self._ranks.device).synchronize()
        return 0.0 if self._ended is None else perf_counter() - self._ended

    def _unused_here(self) -> list[tuple[Tensor, Tensor]]:
        """Returns parameters, with their gradients, that DDP may treat as unused on all ranks."""
        if not (self._model.find_unused_parameters or self._model.static_graph):
            return []
        pairs = ((p, g) for one in self._waiting for p, g in zip(one.parameters, one.gradients, strict=True))
        return [(parameter, gradient) for parameter, gradient in pairs if not bool(gradient.any())]

    def _keep_late(self, unused: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Writes residuals of unused parameters that are sent now to the parameters' gradients.

        DDP leaves the gradient of a parameter alone if no rank has used it in the step; it sets all others itself.
        """
        for parameter, average in unused:
            if not bool(average.any()):
                continue
            if parameter.grad is not None:
                parameter.grad.copy_(average)
            else:
                parameter.grad = average if self._model.gradient_as_bucket_view else average.clone()


def _unscaled() -> float:
    return 1.0


def register(
    model: nn.Module,
    codec: CodecSettings | str,
    *,
    optimizer: Optimizer,
    seed: int = 0,
    loss_scale: Callable[[], float] = _unscaled,
    overlap: bool = False,
    **settings: Any,
) -> ExchangeHook:
    """Registers a communication hook that sums a model's gradients through a codec. All ranks of its group must call it.

    Call it before the first backward pass, with the same settings and seed on every rank. As without a hook, the optimiser gets
    averages over the ranks.

    Args:
        model: `DistributedDataParallel` on Gloo or NCCL.
        codec: Name of the codec, or its settings.
        optimizer: Optimiser of the model; some codecs require SGD.
        seed: Seed of random numbers.
        loss_scale: Returns by what the loss of this step was multiplied, the same on every rank: `GradScaler.get_scale`.
        overlap: Whether buckets are summed while the backward pass computes the gradients of others. A codec that clips does so by
            the larger of the last step's norm and the norm of the gradients that are ready. Needs a copy of the codec's states.
        settings: Settings of a codec that is given by its name.

    Returns:
        The hook, for its metrics and state.

    Raises:
        HookUnsupported: if the model is not wrapped in DDP or cannot use the codec.
        ValidationError: if the settings are invalid.
    """
    found = settings_of(codec, **settings)
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        raise HookUnsupported(
            "FSDP sums gradients in its own reduce-scatter, so no rank has all of them for a codec: use register_fsdp2"
            " between copies of an FSDP2 model, or DistributedDataParallel"
        )
    if not isinstance(model, DistributedDataParallel):
        raise HookUnsupported(f"{type(model).__name__} is not wrapped in DistributedDataParallel")
    if problems := _problems(model, found, optimizer, overlap=overlap):
        raise HookUnsupported("; ".join(problems))
    hook = ExchangeHook(
        model,
        found,
        optimizer="sgd" if isinstance(optimizer, SGD) else "adamw",
        seed=seed,
        loss_scale=loss_scale,
        overlap=overlap,
    )
    model.register_comm_hook(None, hook.receive)
    return hook


def _problems(
    model: DistributedDataParallel, settings: CodecSettings, optimizer: Optimizer, *, overlap: bool
) -> list[str]:
    """Returns why a model cannot use the hook; empty if it can."""
    found = []
    if not isinstance(settings.link, TorchLinkSettings):
        found.append("link: must be kind torch, since DDP exchanges through its process group")
    if not isinstance(settings.outer, EveryStep):
        found.append("outer: must be kind every_step, since DDP sums the gradients of every step")
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    found += optimizer_problems(settings, is_sgd=isinstance(optimizer, SGD), has_momentum=has_momentum)
    if model.mixed_precision is not None:
        found.append("mixed_precision of DDP is not supported: use torch.autocast")
    sparse = (nn.Embedding, nn.EmbeddingBag)
    if any(isinstance(part, sparse) and part.sparse for part in model.module.modules()):
        found.append("codecs do not support the gradients of embeddings with sparse=True")
    if overlap:
        found += overlap_problems(settings, next(model.module.parameters()).device)
    return found


def _trained_by(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Returns the parameters whose gradients DDP sums, by name."""
    named = model.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore}
