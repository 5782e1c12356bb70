"""Sums the gradients of an FSDP2 model between its copies through a codec.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    register_fsdp2(model, mesh["replicate"], "qsgd", optimizer=optimizer)

FSDP2 sums within a copy during the backward pass; each rank then sums its part with the ranks that hold the same part of
other copies, once per optimiser step, before the optimiser reads the gradients (docs/decisions/0037).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from fulmen_exchange.errors import HookUnsupported
from fulmen_exchange.links.settings import TorchLinkSettings
from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.parts import Part, PartsUnsupported, local
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo
from fulmen_exchange.reducer import WHOLE, CodecReducer
from fulmen_exchange.registry import settings_of
from fulmen_exchange.settings import CodecSettings, EveryStep, optimizer_problems


class CopyExchange:
    """The exchange of one rank. Created by `register_fsdp2`.

    Attributes:
        step_info: Input of the policy; the same on every rank but for seconds.
    """

    def __init__(self, reducer: CodecReducer, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """See `register_fsdp2`; `ranks` are those that hold the same part."""
        self.step_info = StepInfo()
        self._reducer = reducer
        self._parameters = parameters
        self._ranks = ranks
        self._is_summed = False

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
        for parameter in self._parameters:
            if parameter.grad is not None:
                local(parameter.grad).div_(self._ranks.world_size)
        self._reducer.reduce(self._parameters, self._ranks, self.step_info)
        self._is_summed = True

    def on_step(self) -> None:
        """Is called after each step of the optimiser."""
        self._is_summed = False
        self._reducer.on_step()

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
        settings: Settings of a codec that is given by its name.

    Raises:
        HookUnsupported: if the model or its optimiser cannot use the codec.
        ValidationError: if the settings are invalid.
    """
    found = settings_of(codec, **settings)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if problems := _problems(named, copies, found, optimizer):
        raise HookUnsupported("; ".join(problems))
    device = next(local(each.detach()).device for each in named.values())
    ranks = Ranks(rank=copies.get_local_rank(), world_size=copies.size(), device=device, group=copies.get_group())
    reducer = CodecReducer.open(
        found,
        parameters=named,
        link=TorchLink(ranks),
        seed=seed,
        optimizer="sgd" if isinstance(optimizer, SGD) else "adamw",
        copy=_copy_of(named, device),
    )
    exchange = CopyExchange(reducer, list(named.values()), ranks)
    optimizer.register_step_pre_hook(lambda *_: exchange.reduce())
    optimizer.register_step_post_hook(lambda *_: exchange.on_step())
    return exchange


def _copy_of(named: dict[str, nn.Parameter], device: torch.device) -> Ranks:
    """Returns the ranks that hold the parts of one copy."""
    mesh = next((each.device_mesh for each in named.values() if isinstance(each, DTensor)), None)
    if mesh is None:
        return WHOLE
    return Ranks(rank=mesh.get_local_rank(), world_size=mesh.size(), device=device, group=mesh.get_group())


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
        found.append("the model has no parameters that train")
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
