"""Tensors of a model, each assembled when it is requested: a model in parts is written without ever being whole in
memory.

All ranks of a copy ask for the same tensors in the same order, since what they hold is gathered.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fulmen_algorithm.weights.tensor_files import Bytes
from fulmen_exchange.ranks import Ranks

Gathered = TypeVar("Gathered")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One tensor.

    Attributes:
        shape: Its shape.
        dtype: Its type in memory.
        whole: Returns it, detached, on any device; all ranks of the copy call it.
        is_copy: Whether nobody else changes its memory, which may then be kept.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: Callable[[], Tensor]
    is_copy: bool = False


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor from the ranks that hold parts of it; other tensors are returned as they are, detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sources_of(tensors: Mapping[str, Tensor], *, are_copies: bool = False) -> dict[str, Source]:
    """Returns the sources of some tensors; `are_copies` if they are of `copies_of`."""
    return {
        name: Source(shape=tuple(tensor.shape), dtype=tensor.dtype, whole=partial(whole, tensor), is_copy=are_copies)
        for name, tensor in tensors.items()
    }


def copies_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies whole tensors into memory of the CPU, so that they can be written while the originals change.

    Args:
        tensors: No parts; on a GPU they are copied into pinned memory, all at once.
        dtype: Type of the copies of floating-point numbers; None for their own.
    """
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        copies[name] = torch.empty(tensor.shape, dtype=kind, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor.detach(), non_blocking=True)
        devices |= {tensor.device} if tensor.is_cuda else set()
    for device in devices:
        torch.cuda.synchronize(device)
    return copies


class FirstRankFailed(Exception):
    """The first rank has raised an error, which it reports; the others have nothing to report."""


def with_each(
    names: Iterable[str],
    gather: Callable[[str], Gathered],
    take: Callable[[str, Gathered], None],
    finish: Callable[[], Result],
    ranks: Ranks,
) -> Result:
    """Gathers tensor by tensor, and returns on every rank what `finish` returns on the first one.

    An error of `take` is raised after the last tensor, since other ranks wait for this one until then.

    Args:
        names: What is gathered, in the same order on every rank.
        gather: Is called by all ranks together.
        take: Does with a tensor what this rank has to do.
        finish: Is called on the first rank.
        ranks: Those that call this together.

    Raises:
        FirstRankFailed: on other ranks, if `take` or `finish` fails on the first one; there its own error.
    """
    failed: Exception | None = None
    found: Result | None = None
    for name in names:
        gathered = gather(name)
        if failed is None:
            try:
                take(name, gathered)
            except Exception as error:  # noqa: BLE001  (raised below)
                failed = error
        del gathered
    if ranks.leads and failed is None:
        try:
            found = finish()
        except Exception as error:  # noqa: BLE001  (raised below)
            failed = error
    first, first_failed = ranks.gather((found, failed is not None))[0]
    if failed is not None:
        raise failed
    if first_failed:
        raise FirstRankFailed
    return first  # type: ignore[return-value]  # the first rank has it, since it has not failed


def own_bytes(content: Bytes, ranks: Ranks) -> Bytes:
    """Copies this rank's share of some bytes."""
    size = -(-content.size // ranks.world_size)
    return content[ranks.rank * size : (ranks.rank + 1) * size].copy()


def all_bytes(share: Bytes, size: int, ranks: Ranks) -> Bytes:
    """Gathers `size` bytes from shares of `own_bytes`."""
    if ranks.group is None:
        return share
    each = -(-size // ranks.world_size)
    mine = torch.zeros(each, dtype=torch.uint8)
    mine[: share.size] = torch.from_numpy(share)
    pieces = [torch.empty(each, dtype=torch.uint8, device=ranks.device) for _ in range(ranks.world_size)]
    dist.all_gather(pieces, mine.to(ranks.device), group=ranks.group)
    whole_one: Bytes = torch.cat(pieces).cpu().numpy()[:size]
    return whole_one
