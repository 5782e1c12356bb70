"""Ranks: processes that train one policy together. A single process is a group of one, with the same code.

Every rank gets the same rows and computes a part of the micro-batches. Invariant: weights of tokens are normalised
over all rows beforehand, so losses and gradients of ranks are *summed*, never averaged, and the result is what one
rank alone would get, but for rounding. Whatever is decided (to skip a step, say) is decided from gathered numbers, on
every rank alike.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2, Precision
from fulmen_algorithm.training.packing import Layout, plan
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import PackingMode
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo

BUCKET_BYTES = 64 * 2**20
"""Gradients are summed in pieces of this size, to avoid a second copy of all of them."""


def join_group(device: torch.device, *, rendezvous: Path, deadline_s: float) -> Ranks:
    """Joins the group of ranks of this machine.

    Args:
        device: Device of this rank.
        rendezvous: File by which the ranks find each other; kept while the group exists.
        deadline_s: Timeout of one collective, in seconds.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=rendezvous.absolute().as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=deadline_s),
    )
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, group=dist.group.WORLD)


def layouts_of(rows: Sequence[Row], ranks: Ranks, *, token_budget: int, mode: PackingMode) -> list[list[Layout]]:
    """Builds micro-batches and distributes them over the ranks, balanced by positions.

    A rank alone fills micro-batches up to the budget; several make them smaller where there would otherwise be fewer
    than ranks, or a rest that one rank works on while the others wait.

    Returns:
        Each rank's micro-batches.

    Raises:
        ValueError: if a single row is longer than the budget.
    """
    layouts = plan(rows, token_budget=token_budget, mode=mode)
    if ranks.world_size > 1 and len(layouts) % ranks.world_size:
        rounds = -(-len(layouts) // ranks.world_size)
        positions = sum(layout.size_tokens for layout in layouts)
        longest = max(len(row.token_ids) for row in rows)
        smaller = max(longest, -(-positions // (rounds * ranks.world_size)))
        layouts = plan(rows, token_budget=min(token_budget, smaller), mode=mode)
    shares: list[list[Layout]] = [[] for _ in range(ranks.world_size)]
    for layout in sorted(layouts, key=lambda one: -one.size_tokens):
        # Largest first, each to the rank with the least load: at most 4/3 of the best distribution (Graham, 1969).
        min(shares, key=lambda share: sum(one.size_tokens for one in share)).append(layout)
    return shares


class GradientReducer(Protocol):
    """Sums the gradients of ranks that hold the same weights; the extension point for gradient exchanges.

    All ranks call the same methods in the same order.
    """

    @property
    def clips_sums(self) -> bool:
        """Whether the caller clips the sum; False if each rank's part is clipped."""

    @property
    def steps_locally(self) -> bool:
        """Whether each rank takes local optimiser steps with its own moments."""

    def reduce(self, parameters: Sequence[nn.Parameter], ranks: Ranks, step_info: StepInfo) -> None:
        """Replaces each parameter's gradient by its sum over the ranks, the same bits on every rank.

        Called once per optimiser step, after the last micro-batch, with the same parameters in the same order. A
        parameter without gradient on any rank keeps none. Where ranks take steps of their own, gradients stay theirs.
        """

    def on_step(self) -> None:
        """Called after all ranks have tried an optimiser step, whether taken or skipped."""

    def synchronize(self) -> None:
        """Makes the weights of all ranks equal before they are read."""

    def drain(self) -> ExchangeReport:
        """Returns metrics and events since the last call."""

    def state(self) -> dict[str, Any]:
        """Returns the state of this rank: tensors, numbers and strings in dicts and lists; may be empty."""

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states of all former ranks; bit for bit with the same number of ranks."""


class AllReduce:
    """Sums gradients as they are, in buckets."""

    clips_sums = True
    steps_locally = False

    def reduce(self, parameters: Sequence[nn.Parameter], ranks: Ranks, step_info: StepInfo) -> None:
        """See `GradientReducer`."""
        if ranks.group is None:
            return
        for bucket in _buckets(shared_gradients(parameters, ranks)):
            flat = ranks.sum(torch.cat([gradient.flatten() for gradient in bucket]))
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def on_step(self) -> None:
        """See `GradientReducer`: does nothing."""

    def synchronize(self) -> None:
        """See `GradientReducer`: weights are always equal."""

    def drain(self) -> ExchangeReport:
        """See `GradientReducer`: no metrics."""
        return ExchangeReport()

    def state(self) -> dict[str, Any]:
        """See `GradientReducer`: no state."""
        return {}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """See `GradientReducer`: no state."""


def shared_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> list[Tensor]:
    """Returns the gradients that any rank has, as zeros where only this one has none.

    Not every rank has a gradient of every parameter: adapters of a role that none of its rows has, for one.
    """
    trained = [p for p in parameters if p.requires_grad]
    present = torch.tensor([float(p.grad is not None) for p in trained], device=ranks.device)
    for parameter, count in zip(trained, ranks.sum(present).tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [p.grad for p in trained if p.grad is not None]


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        bytes_ = gradient.numel() * gradient.element_size()
        if not buckets or size + bytes_ > BUCKET_BYTES or gradient.dtype is not buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += bytes_
    return buckets


def wants_bf16(compute: ComputeSettings, device: torch.device) -> bool:
    """Returns whether passes compute in bf16."""
    if compute.precision is Precision.AUTO:
        return device.type == "cuda"
    return compute.precision is Precision.BF16


def shard(module: nn.Module, layers: Sequence[nn.Module], ranks: Ranks, settings: Fsdp2, *, bf16: bool) -> None:
    """Shards a module over the ranks in place: each of `layers` is a unit, and the rest is another one.

    Weights stay float32; with `bf16` they are gathered and computed with in bf16, and gradients summed in float32.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
    # The head is computed with again in the backward pass (`scorer`), so the root's own weights stay until then.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # Gloo supports only plain sums, without a factor.
            part.set_force_sum_reduction_for_comms(True)


def spread_again(module: nn.Module) -> None:
    """Frees the parameters of other ranks that a sharded module has gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    """Returns a context of mixed precision in bf16, if enabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Computes the global norm of all gradients."""
    return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scales gradients down to a global norm over all parameters; returns the norm before, the same on every rank."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
