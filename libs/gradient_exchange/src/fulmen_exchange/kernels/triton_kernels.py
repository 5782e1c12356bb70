"""The kernels for NVIDIA GPUs, in Triton; see `reference` for what each of them does.

`tests/gpu` compares their bits with those of a CPU. Multiply-adds are not contracted (`enable_fp_fusion`), and division
rounds to nearest, including subnormals, which Triton's own division does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fulmen_exchange.kernels import reference
from fulmen_exchange.kernels.reference import BLOCK

# Not a declared dependency: torch brings it along where it works, and only there is this module imported.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
if torch.version.hip:
    raise ImportError("kernels are for NVIDIA GPUs only")

threshold_of = reference.threshold_of
correct = reference.correct
nearest = reference.nearest
CHUNK = 128
"""Elements of a payload added at a time."""


@triton.jit
def _quotient(left, right):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _feed(gradient, residual, counts, size, threshold, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    offsets = block * LENGTH + tl.arange(0, LENGTH)
    there = offsets < size
    value = tl.load(residual + offsets, there, 0.0) + tl.load(gradient + offsets, there, 0.0)
    tl.store(residual + offsets, value, there)
    taken = (tl.abs(value) >= threshold) & (value != 0.0)
    tl.store(counts + block, tl.sum(taken.to(tl.int32), 0).to(tl.int16))


@triton.jit
def _count(values, counts, size, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    offsets = block * LENGTH + tl.arange(0, LENGTH)
    taken = tl.abs(tl.load(values + offsets, offsets < size, 0.0)) > 0.0
    tl.store(counts + block, tl.sum(taken.to(tl.int32), 0).to(tl.int16))


@triton.jit
def _correct(  # type: ignore[no-untyped-def]
    gradient,
    velocity,
    accumulated,
    counts,
    size,
    momentum,
    threshold,
    NESTEROV: tl.constexpr,  # noqa: N803
    LENGTH: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * LENGTH + tl.arange(0, LENGTH)
    there = offsets < size
    g = tl.load(gradient + offsets, there, 0.0)
    u = tl.load(velocity + offsets, there, 0.0)
    v = tl.load(accumulated + offsets, there, 0.0)
    if NESTEROV:
        u = (u + g) * momentum
        v = (v + u) + g
    else:
        u = u * momentum + g
        v = v + u
    tl.store(velocity + offsets, u, there)
    tl.store(accumulated + offsets, v, there)
    taken = (tl.abs(v) >= threshold) & (v != 0.0)
    tl.store(counts + block, tl.sum(taken.to(tl.int32), 0).to(tl.int16))


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    residual,
    masked,
    begins,
    indices,
    values,
    size,
    threshold,
    MOVES: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
    LENGTH: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, LENGTH)
    offsets = block * LENGTH + within
    value = tl.load(residual + offsets, offsets < size, 0.0)
    taken = (tl.abs(value) >= threshold) & (value != 0.0)
    at = tl.load(begins + block) + tl.cumsum(taken.to(tl.int32), 0) - 1
    rounded = value.to(tl.bfloat16)
    tl.store(indices + at, within.to(tl.int16), taken)
    tl.store(values + at, rounded, taken)
    if MOVES:
        tl.store(residual + offsets, value - rounded.to(tl.float32), taken)
    if MASKED:
        tl.store(masked + offsets, tl.zeros([LENGTH], tl.float32), taken)


@triton.jit
def _add_taken(  # type: ignore[no-untyped-def]
    counts,
    begins,
    indices,
    values,
    out,
    taken,
    size,
    CHUNK: tl.constexpr,  # noqa: N803
    LENGTH: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + block)
    count = tl.load(counts + block).to(tl.int32)
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        live = (index < count) & (begin + index < taken)
        place = tl.load(indices + begin + index, live, 0).to(tl.int64)
        where = block * LENGTH + place
        live = live & (place >= 0) & (place < LENGTH) & (where < size)
        value = tl.load(values + begin + index, live, 0.0).to(tl.float32)
        tl.store(out + where, tl.load(out + where, live, 0.0) + value, live)


@triton.jit(do_not_specialize=["begin", "low", "high"])
def _quantise(  # type: ignore[no-untyped-def]
    values,
    packed,
    scales,
    size,
    begin,
    low,
    high,
    LEVELS: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    LENGTH: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * LENGTH + tl.arange(0, LENGTH)
    there = offsets < size
    value = tl.load(values + offsets, there, 0.0)
    largest = tl.max(tl.abs(value), 0)
    # For every element the same: the division is one of tensors.
    scale = _quotient(largest + tl.zeros([LENGTH], tl.float32), LEVELS + tl.zeros([LENGTH], tl.float32))
    tl.store(scales + block, tl.max(scale, 0))
    x = (begin + offsets).to(tl.uint32)
    x = (x ^ low.to(tl.uint32)) * 0x9E3779B1 + high.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    drawn = (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    rounded = tl.floor(_quotient(value, tl.where(scale > 0, scale, 1.0)) + drawn)
    whole = tl.minimum(tl.maximum(rounded, -LEVELS), LEVELS).to(tl.int32)
    if BITS == 8:
        tl.store(packed + offsets, whole.to(tl.int8), there)
    else:
        groups = tl.reshape(tl.where(there, whole, 0), [LENGTH // 8, 8])
        group = block * (LENGTH // 8) + tl.arange(0, LENGTH // 8)
        for bit in tl.static_range(BITS):
            plane = tl.sum(((groups >> bit) & 1) << tl.arange(0, 8)[None, :], 1)
            tl.store(packed + group * BITS + bit, plane.to(tl.uint8), group * 8 < size)


@triton.jit
def _add_scaled(packed, scales, out, size, BITS: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    offsets = block * LENGTH + tl.arange(0, LENGTH)
    there = offsets < size
    if BITS == 8:
        whole = tl.load(packed + offsets, there, 0).to(tl.int32)
    else:
        whole = tl.zeros([LENGTH], tl.int32)
        for bit in tl.static_range(BITS):
            plane = tl.load(packed + (offsets // 8) * BITS + bit, there, 0).to(tl.int32)
            whole = whole | (((plane >> (offsets % 8).to(tl.int32)) & 1) << bit)
        whole = tl.where(whole >= 2 ** (BITS - 1), whole - 2**BITS, whole)
    product = whole.to(tl.float32) * tl.load(scales + block)
    tl.store(out + offsets, tl.load(out + offsets, there, 0.0) + product, there)


def feedback_select(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.feedback_select`."""
    counts, size = _counts_for(residual), residual.numel()
    _launch(_feed, counts.numel(), gradient, residual, counts, size, threshold, LENGTH=BLOCK)
    return _taken(counts, residual, residual, threshold, masks=False)


def dgc_select(
    gradient: Tensor, velocity: Tensor, accumulated: Tensor, momentum: float, nesterov: bool, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.dgc_select`."""
    counts, size = _counts_for(accumulated), accumulated.numel()
    arguments = (gradient, velocity, accumulated, counts, size, momentum, threshold)
    _launch(_correct, counts.numel(), *arguments, NESTEROV=nesterov, LENGTH=BLOCK)
    return _taken(counts, accumulated, velocity, threshold, masks=True)


def add_sparse(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
    """See `reference.add_sparse`; invalid elements are ignored instead of refused, since codecs have checked them."""
    begins = _begins(counts)
    arguments = (counts, begins, indices, values, out, min(indices.numel(), values.numel()), out.numel())
    _launch(_add_taken, counts.numel(), *arguments, CHUNK=CHUNK, LENGTH=BLOCK)


def quantise(values: Tensor, *, bits: int, block: int, begin: int, seed: int) -> tuple[Tensor, Tensor]:
    """See `reference.quantise`, which is used if a block is not a power of two."""
    if not _fits(block):
        return reference.quantise(values, bits=bits, block=block, begin=begin, seed=seed)
    size = values.numel()
    whole = bits == 8
    packed = values.new_empty(size if whole else -(-size // 8) * bits, dtype=torch.int8 if whole else torch.uint8)
    scales = values.new_empty(-(-size // block))
    arguments = (values, packed, scales, size, begin, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    _launch(_quantise, scales.numel(), *arguments, LEVELS=float(2 ** (bits - 1) - 1), BITS=bits, LENGTH=block)
    return packed, scales


def add_quantised(packed: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """See `reference.add_quantised`, which is used if a block is not a power of two."""
    if _fits(block):
        _launch(_add_scaled, scales.numel(), packed, scales, out, out.numel(), BITS=bits, LENGTH=block)
    else:
        reference.add_quantised(packed, scales, out, bits=bits, block=block)


def nonzero_select(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.nonzero_select`."""
    counts = _counts_for(values)
    _launch(_count, counts.numel(), values, counts, values.numel(), LENGTH=BLOCK)
    return _taken(counts, values, values, 0.0, masks=False, moves=False)


def _fits(block: int) -> bool:
    return block >= 8 and block & (block - 1) == 0


def _counts_for(like: Tensor) -> Tensor:
    return like.new_empty(-(-like.numel() // BLOCK), dtype=torch.int16)


def _begins(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int64) - counts


def _taken(
    counts: Tensor, residual: Tensor, masked: Tensor, threshold: float, *, masks: bool, moves: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    size = int(counts.sum())
    indices, values = residual.new_empty(size, dtype=torch.int16), residual.new_empty(size, dtype=torch.bfloat16)
    arguments = (residual, masked, _begins(counts), indices, values, residual.numel(), threshold)
    _launch(_take, counts.numel(), *arguments, MOVES=moves, MASKED=masks, LENGTH=BLOCK)
    return counts, indices, values


def _launch(kernel: Any, blocks: int, first: Tensor, *others: object, **constants: object) -> None:
    if blocks:
        with torch.cuda.device_of(first):
            kernel[(blocks,)](first, *others, **constants, enable_fp_fusion=False)
