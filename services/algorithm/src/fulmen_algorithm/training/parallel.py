"""Ranks: processes that train one policy together. A single process is a group of one, with the same code.

Every rank gets the same rows and computes a part of the micro-batches. There are one or more copies of the weights, each
whole on one rank (DDP), or in parts on several (FSDP2). Invariant: weights of tokens are normalised over all rows
beforehand, so losses and gradients of ranks are *summed*, never averaged, and the result is what one rank alone would
get, but for rounding. Whatever is decided (to skip a step, say) is decided from gathered numbers, on every rank alike.
"""

import math
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from statistics import fmean
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2, ParallelSettings, Precision
from fulmen_algorithm.training.packing import Layout, plan
from fulmen_algorithm.training.part_loading import part_of, replace_parameters, without_memory
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import PackingMode
from fulmen_algorithm.training.tensor_parallel import TENSOR, is_split
from fulmen_exchange.parts import local
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo

SMALLEST_SHARE = 4
"""A rank that is slower than the mean by more than this factor gets no micro-batches made for it."""
NEWEST_STEP = 0.5
"""Weight of the newest step; earlier steps have the rest."""
IDLE_RANK = 0.1
"""Weight of the mean speed in that of a rank without positions, so that one that was slow once is tried again."""
BUCKET_BYTES = 64 * 2**20
"""Gradients are summed in pieces of this size, to avoid a second copy of all of them."""


def join_group(
    device: torch.device,
    *,
    rendezvous: str,
    listener: socket.socket | None = None,
    deadline_s: float,
    outlives_others: bool = False,
) -> Ranks:
    """Joins the group of ranks.

    Args:
        device: Device of this rank.
        rendezvous: URL at which the ranks find each other: `file:`, of a file that is kept while the group exists, or
            `tcp:`, of the first rank.
        listener: Listening socket of that address, on the first rank.
        deadline_s: Timeout of one collective, in seconds.
        outlives_others: Whether this rank stays when others are lost. Otherwise NCCL ends it immediately.
    """
    if outlives_others:
        # What torch's documentation asks for where `ProcessGroup.abort` is called; Gloo reads neither.
        os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world_size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=deadline_s)
    met = urlsplit(rendezvous)
    # The file of a `file:` store is opened by torch; of `tcp:`, the first rank brings its socket, so no port is guessed.
    store = (
        dist.TCPStore(
            str(met.hostname),
            int(met.port or 0),
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        if met.scheme == "tcp"
        else None
    )
    dist.init_process_group(
        backend,
        init_method=None if store is not None else rendezvous,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, group=dist.group.WORLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The groups of a rank. A run has one or more copies of the weights, each whole on one rank or in parts on several.

    Attributes:
        copy: Ranks that hold one copy together; every pass involves all of them.
        peers: Ranks that hold the same part of each copy; gradients are summed over them once per optimiser step.
        mesh: Mesh of the ranks of the copy that have different rows; None where FSDP does not split it.
        tensor: Ranks of the copy that compute the same rows together, each with parts of the matrices.
        tensor_mesh: Their mesh; None for one rank.
        context: Ranks that compute the same rows together, each a part of the positions. They count as different ones
            otherwise: their gradients are summed.
    """

    copy: Ranks = field(default_factory=Ranks)
    peers: Ranks = field(default_factory=Ranks)
    mesh: DeviceMesh | None = None
    tensor: Ranks = field(default_factory=Ranks)
    tensor_mesh: DeviceMesh | None = None
    context: Ranks = field(default_factory=Ranks)

    @property
    def together(self) -> int:
        """Ranks that compute the same rows."""
        return self.tensor.world_size * self.context.world_size

    def sharing(self, ranks: Ranks) -> tuple[Ranks, slice]:
        """Returns this rank among those with different rows, of all `ranks`, and which of them are of its copy."""
        each = self.together
        mine, own = replace(ranks, rank=ranks.rank // each, world_size=ranks.world_size // each), self.copy
        first = mine.rank - own.rank // each
        return mine, slice(first, first + max(own.world_size // each, 1))

    @property
    def once(self) -> slice:
        """Picks, of what all ranks have gathered, one of those that have computed the same rows."""
        return slice(None, None, self.together)


def groups_of(ranks: Ranks, parallel: ParallelSettings) -> RankGroups:
    """Returns the groups of this rank; all ranks call it. Ranks of one copy have consecutive numbers.

    So do ranks that compute the same rows.
    """
    context = Ranks(device=ranks.device)
    if parallel.context > 1:
        mesh = _context_mesh(ranks.group, ranks.device.type, ranks.world_size // parallel.context, parallel.context)
        context = _group(mesh["context"], ranks.device)
    if parallel.tensor > 1:
        parts = parallel.ranks_per_copy // parallel.tensor
        split = _split_mesh(
            ranks.group, ranks.device.type, ranks.world_size // parallel.ranks_per_copy, parts, parallel.tensor
        )
        return RankGroups(
            copy=_group(split["copy"], ranks.device),
            peers=_group(split[_COPIES], ranks.device),
            mesh=split[_PARTS] if isinstance(parallel, Fsdp2) else None,
            tensor=_group(split[TENSOR], ranks.device),
            tensor_mesh=split[TENSOR],
        )
    if not isinstance(parallel, Fsdp2):
        return RankGroups(copy=Ranks(device=ranks.device), peers=ranks, context=context)
    mesh = _mesh(ranks.group, ranks.device.type, parallel.copies, parallel.ranks_per_copy)
    copy, peers = (_group(mesh[name], ranks.device) for name in (_PARTS, _COPIES))
    if ranks.way_out is not None:
        peers = replace(peers, way_out=ranks.way_out)
        if peers.group is not None and peers.group not in ranks.way_out.groups:
            ranks.way_out.groups.append(peers.group)
        if copy.group is not None:
            ranks.way_out.agree = partial(_any, copy)
    return RankGroups(copy=copy, peers=peers, mesh=mesh[_PARTS], context=context)


def _any(ranks: Ranks, yes: bool) -> bool:
    return bool(ranks.sum(torch.tensor([float(yes)], device=ranks.device)))


# By the name of the second one, peft knows that a layer in parts computes as if it were whole.
_COPIES, _PARTS = "copies", "fsdp"


@cache
def _mesh(_: dist.ProcessGroup | None, device_type: str, copies: int, parts: int) -> DeviceMesh:
    # Groups are never closed, so all trainers of a process share them.
    return init_device_mesh(device_type, (copies, parts), mesh_dim_names=(_COPIES, _PARTS))


@cache
def _context_mesh(_: dist.ProcessGroup | None, device_type: str, groups: int, context: int) -> DeviceMesh:
    return init_device_mesh(device_type, (groups, context), mesh_dim_names=("rows", "context"))


@cache
def _split_mesh(
    _: dist.ProcessGroup | None, device_type: str, copies: int, parts: int, tensor: int
) -> dict[str, DeviceMesh]:
    names = (_COPIES, _PARTS, TENSOR)
    mesh = init_device_mesh(device_type, (copies, parts, tensor), mesh_dim_names=names)
    return {**{name: mesh[name] for name in names}, "copy": mesh[_PARTS, TENSOR]._flatten("copy")}


def _group(mesh: DeviceMesh, device: torch.device) -> Ranks:
    if mesh.size() == 1:
        return Ranks(device=device)
    return Ranks(rank=mesh.get_local_rank(), world_size=mesh.size(), device=device, group=mesh.get_group())


def layouts_of(
    rows: Sequence[Row], ranks: Ranks, *, token_budget: int, mode: PackingMode, speeds: Sequence[float] = ()
) -> list[list[Layout]]:
    """Builds micro-batches and distributes them over the ranks, balanced by positions, or by the time they take.

    A rank alone fills micro-batches up to the budget; several make them smaller where there would otherwise be fewer
    than ranks, or a rest that one rank works on while the others wait, or too large a piece for a slow rank.

    Args:
        rows: All rows.
        ranks: Those that share them.
        token_budget: Most positions of a micro-batch.
        mode: Padded or packed.
        speeds: Positions per second by rank, > 0; empty for ranks that are equally fast. By these, the last rank never
            ends later than if positions alone were balanced.

    Returns:
        Each rank's micro-batches.

    Raises:
        ValueError: if a single row is longer than the budget.
    """
    layouts = plan(rows, token_budget=token_budget, mode=mode)
    longest = max((len(row.token_ids) for row in rows), default=1)
    positions = sum(layout.size_tokens for layout in layouts)
    if ranks.world_size > 1 and len(layouts) % ranks.world_size:
        rounds = -(-len(layouts) // ranks.world_size)
        smaller = max(longest, -(-positions // (rounds * ranks.world_size)))
        layouts = plan(rows, token_budget=min(token_budget, smaller), mode=mode)
    alike = _dealt(layouts, [1.0] * ranks.world_size)
    if not speeds or ranks.world_size == 1:
        return alike
    share = max(min(speeds) / sum(speeds), 1.0 / (SMALLEST_SHARE * ranks.world_size))
    smaller = max(longest, math.ceil(positions * share))
    pieces = plan(rows, token_budget=min(token_budget, smaller), mode=mode)
    return min(alike, _dealt(layouts, speeds), _dealt(pieces, speeds), key=lambda shares: last_end_s(shares, speeds))


def _dealt(layouts: Sequence[Layout], speeds: Sequence[float]) -> list[list[Layout]]:
    """Deals micro-batches, the largest first, each to the rank that ends with it first.

    With equal speeds the last rank takes at most 4/3 of the best distribution's time (Graham, 1969), with others at
    most twice (Gonzalez, Ibarra and Sahni, 1977).
    """
    shares: list[list[Layout]] = [[] for _ in speeds]
    loads = [0] * len(speeds)
    for layout in sorted(layouts, key=lambda one: -one.size_tokens):
        ends = [(load + layout.size_tokens) / speed for load, speed in zip(loads, speeds, strict=True)]
        rank = ends.index(min(ends))
        shares[rank].append(layout)
        loads[rank] += layout.size_tokens
    return shares


def last_end_s(shares: Sequence[Sequence[Layout]], speeds: Sequence[float]) -> float:
    """Returns after how many seconds the last rank ends, at speeds in positions per second."""
    return max(sum(layout.size_tokens for layout in share) / speed for share, speed in zip(shares, speeds, strict=True))


def wait_for(device: torch.device) -> None:
    """Waits for a GPU's queued work, so that its seconds count where they are spent."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RankSpeeds:
    """Positions per second of each rank in earlier steps, from gathered numbers: the same on every rank.

    Ranks of one copy of the weights wait for each other in every pass, so they count as equally fast.
    """

    def __init__(self, *, ranks_per_copy: int) -> None:
        self._ranks_per_copy = ranks_per_copy
        self._speeds: tuple[float, ...] = ()

    @property
    def by_rank(self) -> tuple[float, ...]:
        """Positions per second by rank; empty before the first step."""
        return self._speeds

    def note(self, positions: Sequence[int], seconds: Sequence[float]) -> None:
        """Notes a step.

        Args:
            positions: Positions that each rank has computed.
            seconds: Seconds of its passes.
        """
        each = self._ranks_per_copy
        found: list[float | None] = []
        for first in range(0, len(positions), each):
            computed, spent_s = sum(positions[first : first + each]), max(seconds[first : first + each])
            found += [computed / each / spent_s if computed and spent_s > 0 else None] * each
        known = [speed for speed in found if speed is not None]
        if not known:
            return
        mean = fmean(known)
        earlier = self._speeds or [mean if speed is None else speed for speed in found]
        self._speeds = tuple(
            old + (IDLE_RANK * (mean - old) if new is None else NEWEST_STEP * (new - old))
            for new, old in zip(found, earlier, strict=True)
        )


class GradientReducer(Protocol):
    """Sums the gradients of ranks that hold the same weights, or the same part of them: `RankGroups.peers`.

    The extension point for gradient exchanges. Parameters and gradients of a part are distributed tensors.

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
    """Sums gradients as they are, in buckets. Those of a model on another device than the ranks' take the way over that."""

    clips_sums = True
    steps_locally = False

    def reduce(self, parameters: Sequence[nn.Parameter], ranks: Ranks, step_info: StepInfo) -> None:
        """See `GradientReducer`."""
        if ranks.group is None:
            return
        for bucket in _buckets(shared_gradients(parameters, ranks)):
            flat = ranks.sum(torch.cat([gradient.flatten() for gradient in bucket]).to(ranks.device))
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
    """Returns the gradients, or this rank's parts of them, that any rank has, as zeros where only this one has none.

    Not every rank has a gradient of every parameter: adapters of a role that none of its rows has, for one, or all of
    them on a rank without rows.
    """
    trained = [p for p in parameters if p.requires_grad]
    present = torch.tensor([float(p.grad is not None) for p in trained], device=ranks.device)
    for parameter, count in zip(trained, ranks.sum(present).tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [local(p.grad) for p in trained if p.grad is not None]


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


def shard(module: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, settings: Fsdp2, *, bf16: bool) -> None:
    """Shards a module over the ranks of a copy in place: each of `layers` is a unit, and the rest is another one.

    Parameters may be parts already, or whole. Weights stay float32; with `bf16` they are gathered and computed with in bf16,
    and gradients summed in float32. Sums over copies are left to a `GradientReducer`
    (docs/decisions/0037-copies-are-summed-after-the-backward-pass.md).
    """
    parts: dict[str, nn.Parameter] = {}
    if not any(map(is_split, module.parameters())):
        replace_parameters(module, lambda parameter: part_of(parameter, mesh))
        parts = dict(module.named_parameters(remove_duplicate=False))
        # Units are made of parameters without memory, and then given the parts.
        replace_parameters(module, without_memory)
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
    if parts:
        module.load_state_dict(parts, strict=False, assign=True)
    if hasattr(module, "try_out"):
        register_fsdp_forward_method(module, "try_out")


def spread_again(module: nn.Module) -> None:
    """Frees the parameters of other ranks that a sharded module has gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    """Returns a context of mixed precision in bf16, if enabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
