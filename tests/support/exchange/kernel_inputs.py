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


def results(
    of: Kernels, gradient: Tensor, state: Tensor, *, threshold: float, nesterov: bool, bits: int, block: int = 512
) -> tuple[Tensor, ...]:
    """Runs every kernel on copies of two inputs; returns all outputs and changed states."""
    gradient, state = gradient.clone(), state.clone()
    residual, velocity, accumulated, momentum = (state.clone() for _ in range(4))
    taken = of.feedback_select(gradient, residual, threshold)
    sparse_sum = state.clone()
    of.add_sparse(*taken, sparse_sum)
    nonzero = of.nonzero_select(gradient)
    of_two_rounds = [
        part
        for _ in range(2)
        for part in of.dgc_select(gradient.clone(), velocity, accumulated, 0.9, nesterov, threshold)
    ]
    first, second = torch.empty_like(state), gradient.flip(0).contiguous()
    of.correct(gradient, momentum, 0.9, nesterov, first)
    of.correct(second, momentum, 0.9, nesterov, second)  # in place
    packed, scales = of.quantise(gradient, bits=bits, block=block, begin=4096 * 2**21 - 4096, seed=0xDEADBEEF12345678)
    quantised_sum = state.clone()
    of.add_quantised(packed, scales, quantised_sum, bits=bits, block=block)
    nearest, steps = of.nearest(gradient, bits=bits, block=block)
    left = gradient.clone()
    of.add_quantised(nearest, -steps, left, bits=bits, block=block)
    return (
        *(*taken, residual, sparse_sum),
        *(*nonzero, gradient.clone()),
        *(*of_two_rounds, velocity, accumulated),
        *(first, second, momentum),
        *(packed, scales, quantised_sum),
        *(nearest, steps, left),
    )


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
