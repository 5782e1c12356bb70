"""Inputs for the tests of kernels: float32 of every magnitude, and bits to compare."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fulmen_exchange.kernels.selection import Kernels

SIZES = (1, 7, 8, 9, 511, 512, 513, 4095, 4096, 4097, 3 * 4096 + 77)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def numbers(size: int, seed: int, *, lowest: int = -149, highest: int = 120) -> Tensor:
    """Returns float32 [size] of either sign: powers of two in a range, subnormal ones below -126, and zeros of both signs."""
    random = np.random.default_rng(seed)
    values = random.normal(size=size) * 2.0 ** random.integers(lowest, highest + 1, size=size)
    values *= random.random(size) > 0.1
    return torch.from_numpy(values.astype(np.float32))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compares types, shapes and bits; 0 and -0 differ."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    words = WORDS[one.element_size()]
    return torch.equal(one.cpu().view(words), other.cpu().view(words))


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    """Fails if any of some tensors differ."""
    assert len(one) == len(other)
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        assert same_bits(left, right), f"tensor {index} differs"


def selected(of: Kernels, gradient: Tensor, state: Tensor, threshold: float) -> tuple[Tensor, ...]:
    """Selects with feedback; returns the payload, what is kept back, and a segment that the payload was added to."""
    residual, sum_ = state.clone(), state.clone()
    taken = of.feedback_select(gradient.clone(), residual, threshold)
    of.add_sparse(*taken, sum_)
    return (*taken, residual, sum_)


def corrected(of: Kernels, gradient: Tensor, state: Tensor, threshold: float, *, nesterov: bool) -> tuple[Tensor, ...]:
    """Selects as DGC does, two rounds; returns both payloads, u and v."""
    velocity, accumulated = state.clone(), state.flip(0).contiguous()
    first = of.dgc_select(gradient.clone(), velocity, accumulated, 0.9, nesterov, threshold)
    second = of.dgc_select(gradient.clone(), velocity, accumulated, 0.9, nesterov, threshold)
    return (*first, *second, velocity, accumulated)


def stepped(of: Kernels, gradient: Tensor, state: Tensor, *, nesterov: bool) -> tuple[Tensor, ...]:
    """Takes two steps with momentum, the second in the place of its gradient; returns what the steps are, and u."""
    velocity, first, second = state.clone(), torch.empty_like(state), gradient.flip(0).contiguous()
    of.correct(gradient.clone(), velocity, 0.9, nesterov, first)
    of.correct(second, velocity, 0.9, nesterov, second)
    return first, second, velocity


def quantised(of: Kernels, values: Tensor, state: Tensor, *, bits: int, block: int = 512) -> tuple[Tensor, ...]:
    """Quantises; returns the payload, and a segment that it was added to."""
    packed, scales = of.quantise(values, bits=bits, block=block, begin=4096 * 2**21 - 4096, seed=0xDEADBEEF12345678)
    sum_ = state.clone()
    of.add_quantised(packed, scales, sum_, bits=bits, block=block)
    return packed, scales, sum_


def rounded(of: Kernels, values: Tensor, *, bits: int, block: int = 512) -> tuple[Tensor, ...]:
    """Rounds to the nearest; returns the payload, and what is left of the values."""
    packed, scales = of.nearest(values, bits=bits, block=block)
    left = values.clone()
    of.add_quantised(packed, -scales, left, bits=bits, block=block)
    return packed, scales, left


def rounded_multiples(of: Kernels, *, device: str = "cpu") -> list[int]:
    """Quantises j times the scale, where 0 is drawn; returns each integer less its j, which is 0 if quotients are exact.

    As a product with the reciprocal of the scale, many of these quotients are a little less than j, and rounded down.
    """
    found = []
    for scale in (41.0, 47.0, 49.0, 55.0, 61.0, 82.0):
        for j in range(1, 128):
            values = torch.tensor([j * scale, 127 * scale], device=device)
            whole, _ = of.quantise(values, bits=8, block=512, begin=0, seed=0)  # place 0 and seed 0 draw 0
            found.append(int(whole[0]) - j)
    return found
