"""Activations in the memory of the CPU between a forward and its backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fulmen_algorithm.training.passes import MIB


def offloaded(is_large: Callable[[Tensor], bool] | None = None) -> AbstractContextManager[Any]:
    """Returns a context of a forward pass whose saved tensors are moved; the backward pass brings them back.

    Args:
        is_large: Whether a tensor is worth it; by default one of a MiB on a GPU. Weights never are: they stay.
    """
    chosen = is_large or (lambda tensor: tensor.is_cuda and tensor.nbytes >= MIB)

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if not chosen(tensor) or isinstance(tensor, torch.nn.Parameter) or tensor._base is not None:
            return tensor.device, tensor
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        # In order with the kernels that write it; the backward pass reads it on the same stream.
        return tensor.device, there.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)
