"""Loops over every element of a gradient: compiled for CPUs and GPUs if possible, otherwise torch operations.

All implementations give the same bits (`selection` picks one; see docs/decisions/0013). Tensors that are changed or
encoded must be float32, contiguous and on one device; otherwise ValueError is raised.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from fulmen_exchange.kernels.loader import KernelsUnavailable
from fulmen_exchange.kernels.selection import Kernels, KernelSelector

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KernelsUnavailable",
    "add_quantised",
    "add_sparse",
    "checksum",
    "correct",
    "dgc_select",
    "feedback_select",
    "nearest",
    "nonzero_select",
    "quantise",
    "round_at_random",
    "sample_places",
    "threshold_of",
]

_selector = KernelSelector()


def sample_places(like: Tensor, share: float, seed: int) -> Tensor | None:
    """Returns the places of elements to estimate a threshold from; None for all. See `sampling.places_of`."""
    from fulmen_exchange.kernels import sampling

    return sampling.places_of(like.numel(), share, seed=seed, device=like.device)


def round_at_random(values: Tensor, out: Tensor, seed: int) -> None:
    """Writes float32 values to bfloat16 ones, without bias. See `rounding.round_at_random`."""
    from fulmen_exchange.kernels import rounding

    rounding.round_at_random(values, out, seed)


def threshold_of(sample: Tensor, share: float) -> float:
    """Returns the magnitude that a share of a sample reaches; 0.0 if all of it does. See `reference.threshold_of`."""
    return _selector.of(sample.device.type).threshold_of(sample, share)


def feedback_select(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gradient to the residual and removes the elements at or above the threshold. See `reference.feedback_select`."""
    return _of(residual, gradient).feedback_select(gradient, residual, threshold)


def dgc_select(
    gradient: Tensor, velocity: Tensor, accumulated: Tensor, momentum: float, nesterov: bool, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Applies momentum correction, removes elements at or above the threshold, and masks. See `reference.dgc_select`."""
    kernels = _of(accumulated, velocity, gradient)
    return kernels.dgc_select(gradient, velocity, accumulated, momentum, nesterov, threshold)


def nonzero_select(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the elements that are not zero. See `reference.nonzero_select`."""
    return _of(values).nonzero_select(values)


def correct(gradient: Tensor, velocity: Tensor, momentum: float, nesterov: bool, out: Tensor) -> None:
    """Writes the update of SGD with momentum to `out`, which may be the gradient. See `reference.correct`."""
    _of(out, velocity, gradient).correct(gradient, velocity, momentum, nesterov, out)


def add_sparse(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
    """Adds selected elements to a segment, float32 [n], in place. See `reference.add_sparse`."""
    kinds = tuple(str(part.dtype) for part in (counts, indices, values))
    if kinds != ("torch.int16", "torch.int16", "torch.bfloat16"):
        raise ValueError("counts, indices and values must be int16, int16 and bfloat16")
    _of(out).add_sparse(counts.contiguous(), indices.contiguous(), values.contiguous(), out)


def quantise(values: Tensor, *, bits: int, block: int, begin: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rounds each block stochastically to integers of `bits` bits. See `reference.quantise`."""
    return _of(values).quantise(values, bits=bits, block=block, begin=begin, seed=seed)


def nearest(values: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Rounds each block to the nearest integers of `bits` bits. See `reference.nearest`."""
    return _of(values).nearest(values, bits=bits, block=block)


def add_quantised(packed: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Adds quantised elements to a segment, float32 [n], in place. See `reference.add_quantised`."""
    size, kinds = out.numel(), (str(packed.dtype), str(scales.dtype))
    if kinds != ("torch.int8" if bits == 8 else "torch.uint8", "torch.float32"):
        raise ValueError("integers must be int8 or bit planes of uint8, and scales float32")
    if packed.numel() != (size if bits == 8 else -(-size // 8) * bits) or scales.numel() != -(-size // block):
        raise ValueError(f"parts do not match {size} elements of {bits} bits with a scale per {block}")
    _of(out).add_quantised(packed.contiguous(), scales.contiguous(), out, bits=bits, block=block)


def checksum(data: bytes | memoryview, value: int = 0) -> int:
    """Returns the CRC-32 (ISO-HDLC, as in zlib) of flat bytes.

    Args:
        data: The bytes.
        value: Checksum of the bytes before them.
    """
    return _checksum()(data, value)


@lru_cache(maxsize=1)
def _checksum() -> Callable[[bytes | memoryview, int], int]:
    from fulmen_exchange.kernels.native import NativeKernels

    found = _selector.of("cpu")
    return found.checksum if isinstance(found, NativeKernels) and found.checks_quickly else zlib.crc32


def _of(first: Tensor, *others: Tensor) -> Kernels:
    """Returns the kernels for some tensors after checking them: compiled code does not check bounds."""
    for tensor in (first, *others):
        if str(tensor.dtype) != "torch.float32" or not tensor.is_contiguous():
            raise ValueError("gradients and states must be float32 and contiguous")
        if tensor.numel() != first.numel() or tensor.device != first.device:
            raise ValueError("gradients and states must have one size and device")
    return _selector.of(first.device.type)
