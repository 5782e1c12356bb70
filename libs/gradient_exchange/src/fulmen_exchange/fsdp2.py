"""Sums the gradients of an FSDP2 model between its copies through a codec.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    register_fsdp2(model, mesh["replicate"], "qsgd", optimizer=optimizer)

FSDP2 sums within a copy during the backward pass; each rank then sums its part with the ranks that hold the same part of
other copies, once per optimiser step, before the optimiser reads the gradients (docs/decisions/0037).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from fulmen_exchange.errors import HookUnsupported
from fulmen_exchange.links.settings import TorchLinkSettings
from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.overlap import OverlappedRounds, apart, overlap_problems
from fulmen_exchange.parts import Part, PartsUnsupported, local
from fulmen_exchange.ranks import CPU, ExchangeReport, Ranks, StepInfo
from fulmen_exchange.reducer import WHOLE, CodecReducer
from fulmen_exchange.registry import make_codec, settings_of
from fulmen_exchange.settings import CodecSettings, EveryStep, optimizer_problems


class CopyExchange:
    """The exchange of one rank. Created by `register_fsdp2`.

    Attributes:
        step_info: Input of the policy; the same on every rank but for seconds.
    """

    def __init__(
        self, reducer: CodecReducer, parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, overlap: bool
    ) -> None:
        """See `register_fsdp2`; `ranks` are those that hold the same part."""
        self.step_info = StepInfo()
        self._reducer = reducer
        self._parameters = parameters
        self._ranks = ranks
        self._is_summed = False
        self._there: set[str] = set()
        self._is_begun = False  # the round, before all of its gradients are there
        self._overlapped = OverlappedRounds(reducer) if overlap else None
        for name, parameter in parameters.items() if overlap else ():
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))

    @property
    def rounds(self) -> int:
        """Number of completed rounds; steps with gradients that are not finite have none."""
        return self._reducer.rounds

    @property
    def clips_sums(self) -> bool:
        """Whether the caller may clip the sums; otherwise the codec clips each copy's gradients."""
        return self._reducer.clips_sums

    def reduce(self) -> None:
        """Replaces the gradients by their averages over the copies, after the last backward pass of a step.

        Called by the optimiser's `step` unless the caller has: call it before clipping. All ranks call it. If gradients are
        not finite on any rank, those of all become NaN.

        Raises:
            RanksDiverged: if copies no longer hold the same weights.
        """
        if self._is_summed:
            return
        if self._overlapped is not None and self._is_begun:
            self._overlapped.complete(self.step_info)
        else:
            for parameter in self._parameters.values():
                self._prepare(parameter)
            self._reducer.reduce(list(self._parameters.values()), self._ranks, self.step_info)
        self._is_summed = True

    def on_step(self) -> None:
        """Is called after each step of the optimiser."""
        self._is_summed = self._is_begun = False
        self._there.clear()
        self._reducer.on_step()

    def _prepare(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            local(parameter.grad).div_(self._ranks.world_size)

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        """Is called by FSDP2 when it has summed the gradient of a parameter within the copy."""
        if self._overlapped is None or not isinstance(parameter, nn.Parameter):
            return
        if name in self._there:
            raise HookUnsupported(
                f"{name} has a second gradient before the optimiser's step, and the first is already being summed: call"
                " set_requires_gradient_sync(False) before all backward passes of a step but the last"
            )
        if not self._there:
            self._is_begun = self._overlapped.begin()
        self._there.add(name)
        if self._is_begun:
            self._overlapped.add([name], partial(self._prepare, parameter))

    def drain(self) -> ExchangeReport:
        """Returns metrics and events since the last call."""
        return self._reducer.drain()

    def state(self) -> dict[str, Any]:
        """Returns this rank's state, to be stored in a checkpoint with the weights."""
        return self._reducer.state()

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of all ranks, of any number of copies and parts; exact with the same.

        Raises:
            ResidualsInvalid: if they belong to another model or version.
            PolicyStateInvalid: if they belong to another policy.
        """
        self._reducer.restore(states)


def register_fsdp2(
    model: nn.Module,
    copies: DeviceMesh,
    codec: CodecSettings | str,
    *,
    optimizer: Optimizer,
    seed: int = 0,
    overlap: bool = False,
    **settings: Any,
) -> CopyExchange:
    """Sums a model's gradients between its copies through a codec. All ranks call it, before the first step.

    The optimiser gets averages over the copies. `GradScaler` is not supported, which skips steps on single ranks: train in
    bfloat16.

    Args:
        model: Model that `fully_shard` has spread over one dimension of ranks, the same for every copy.
        copies: Mesh of one dimension: the ranks that hold the same part as this one.
        codec: Name of the codec, or its settings.
        optimizer: Optimiser of the model; some codecs require SGD.
        seed: Seed of random numbers, the same on every rank.
        overlap: Whether buckets are summed while the backward pass computes the gradients of others. Micro-batches but the last of
            a step then need `set_requires_gradient_sync(False)`. Needs a copy of the codec's states.
        settings: Settings of a codec that is given by its name.

    Raises:
        HookUnsupported: if the model or its optimiser cannot use the codec.
        ValidationError: if the settings are invalid.
    """
    found = settings_of(codec, **settings)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    problems = _problems(named, copies, found, optimizer)
    device = next((local(each.detach()).device for each in named.values()), CPU)
    if overlap:
        problems += overlap_problems(found, device) + _clip_problems(named, found)
    if problems:
        raise HookUnsupported("; ".join(problems))
    ranks = Ranks(rank=copies.get_local_rank(), world_size=copies.size(), device=device, group=copies.get_group())
    ranks = apart(ranks) if overlap else ranks
    reducer = CodecReducer.open(
        found,
        parameters=named,
        link=TorchLink(ranks),
        seed=seed,
        optimizer="sgd" if isinstance(optimizer, SGD) else "adamw",
        copy=_copy_of(named, device),
    )
    exchange = CopyExchange(reducer, named, ranks, overlap=overlap)
    optimizer.register_step_pre_hook(lambda *_: exchange.reduce())
    optimizer.register_step_post_hook(lambda *_: exchange.on_step())
    return exchange


def _copy_of(named: dict[str, nn.Parameter], device: torch.device) -> Ranks:
    """Returns the ranks that hold the parts of one copy."""
    mesh = next((each.device_mesh for each in named.values() if isinstance(each, DTensor)), None)
    if mesh is None:
        return WHOLE
    return Ranks(rank=mesh.get_local_rank(), world_size=mesh.size(), device=device, group=mesh.get_group())


def _clip_problems(named: dict[str, nn.Parameter], settings: CodecSettings) -> list[str]:
    """Returns why gradients in parts cannot be clipped before all are ready: the norm of a part is not the norm of a
    copy."""
    limit = make_codec(settings).local_clip
    if limit is None or limit == math.inf or not any(isinstance(each, DTensor) for each in named.values()):
        return []
    return [f"overlap: {settings.name} clips to the norm of whole gradients; set clip to 0"]


def _problems(
    named: dict[str, nn.Parameter], copies: DeviceMesh, settings: CodecSettings, optimizer: Optimizer
) -> list[str]:
    """Returns why a model cannot use the exchange; empty if it can."""
    found = optimizer_problems(
        settings,
        is_sgd=isinstance(optimizer, SGD),
        has_momentum=any(group.get("momentum") for group in optimizer.param_groups),
    )
    if not named:
        found.append("the model has no trainable parameters")
    if copies.ndim != 1:
        found.append(f"copies: must be a mesh of one dimension, has {copies.ndim}")
    if not isinstance(settings.link, TorchLinkSettings):
        found.append("link: must be kind torch, since servers do not tell parts of the weights apart")
    if not isinstance(settings.outer, EveryStep):
        found.append("outer: must be kind every_step; OuterLoop takes steps of each copy's own")
    try:
        Part.of(named)
    except PartsUnsupported as error:
        found.append(
            f"{error}: call fully_shard with the dimension of the mesh that spreads one copy, without that of the copies"
        )
    return found
