"""The loops over every element of a gradient: compiled for CPUs and GPUs where that can be had, else in torch's operations.

All of them give the same bits (`choice` says which are used, docs/decisions/0013 why). Tensors that are changed or
encoded are float32, contiguous and on one device; ValueError says so where they are not.
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
    "quantise",
    "sampled",
    "threshold_of",
]

SAMPLE = 100_000
"""Elements, at most, by which a threshold is estimated."""
_selector = KernelSelector()


def sampled(tensor: Tensor) -> Tensor:
    """Returns every so many-th element, at most about `SAMPLE` of them, as a view."""
    # An odd stride, so that it runs through all columns of a matrix.
    return tensor[:: max(1, tensor.numel() // SAMPLE) | 1]


def threshold_of(sample: Tensor, share: float) -> float:
    """Returns the magnitude that a share of a sample reaches; 0.0 if all of it does. See `reference.threshold_of`."""
    return _selector.of(sample.device.type).threshold_of(sample, share)


def feedback_select(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gradient to what was kept back, and takes out what reaches the threshold. See `reference.feedback_select`."""
    return _of(residual, gradient).feedback_select(gradient, residual, threshold)


def dgc_select(
    gradient: Tensor, velocity: Tensor, accumulated: Tensor, momentum: float, nesterov: bool, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Applies momentum correction, takes out what reaches the threshold, and masks. See `reference.dgc_select`."""
    kernels = _of(accumulated, velocity, gradient)
    return kernels.dgc_select(gradient, velocity, accumulated, momentum, nesterov, threshold)


def correct(gradient: Tensor, velocity: Tensor, momentum: float, nesterov: bool, out: Tensor) -> None:
    """Puts in `out` what a step of SGD with momentum takes of a gradient; it may be the gradient. See `reference.correct`."""
    _of(out, velocity, gradient).correct(gradient, velocity, momentum, nesterov, out)


def add_sparse(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
    """Adds what `feedback_select` has taken to a segment, float32 [n], in place. See `reference.add_sparse`."""
    kinds = tuple(str(part.dtype) for part in (counts, indices, values))
    if kinds != ("torch.int16", "torch.int16", "torch.bfloat16"):
        raise ValueError("counts, indices and values are int16, int16 and bfloat16")
    _of(out).add_sparse(counts.contiguous(), indices.contiguous(), values.contiguous(), out)


def quantise(values: Tensor, *, bits: int, block: int, begin: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rounds each block to integers of `bits` bits, at random, so that the mean is exact. See `reference.quantise`."""
    return _of(values).quantise(values, bits=bits, block=block, begin=begin, seed=seed)


def nearest(values: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Rounds each block to the nearest integers of `bits` bits. See `reference.nearest`."""
    return _of(values).nearest(values, bits=bits, block=block)


def add_quantised(packed: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Adds what `quantise` has made to a segment, float32 [n], in place. See `reference.add_quantised`."""
    size, kinds = out.numel(), (str(packed.dtype), str(scales.dtype))
    if kinds != ("torch.int8" if bits == 8 else "torch.uint8", "torch.float32"):
        raise ValueError("integers are int8 or planes of uint8, and scales float32")
    if packed.numel() != (size if bits == 8 else -(-size // 8) * bits) or scales.numel() != -(-size // block):
        raise ValueError(f"these are not {size} elements of {bits} bits with a scale for each {block}")
    _of(out).add_quantised(packed.contiguous(), scales.contiguous(), out, bits=bits, block=block)


def checksum(data: bytes | memoryview, value: int = 0) -> int:
    """Returns the CRC-32 (ISO-HDLC, as in zlib) of flat bytes.

    Args:
        data: They.
        value: That of what stands before them.
    """
    return _checksum()(data, value)


@lru_cache(maxsize=1)
def _checksum() -> Callable[[bytes | memoryview, int], int]:
    from fulmen_exchange.kernels.native import NativeKernels

    found = _selector.of("cpu")
    return found.checksum if isinstance(found, NativeKernels) and found.checks_quickly else zlib.crc32


def _of(first: Tensor, *others: Tensor) -> Kernels:
    """Returns the kernels for some tensors, having checked them: compiled code reads whatever is there."""
    for tensor in (first, *others):
        if str(tensor.dtype) != "torch.float32" or not tensor.is_contiguous():
            raise ValueError("gradients and states are float32 and contiguous")
        if tensor.numel() != first.numel() or tensor.device != first.device:
            raise ValueError("gradients and states are of one size, on one device")
    return _selector.of(first.device.type)
