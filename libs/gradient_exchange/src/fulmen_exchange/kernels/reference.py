"""The kernels in torch's operations: what the compiled ones must equal, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096
"""Elements of one block of a sparse payload; a place within it fits 16 bits."""
SPARSE_INVALID = "a sparse payload names an element that is not there, or one twice, or not in order"
_WORD = 0xFFFFFFFF
_PIECE = 32_768
"""Elements that are quantised at a time."""


def kept_of(size: int, share: float) -> int:
    """Returns how many elements a share of a sample is, at least one."""
    return max(1, round(share * size))


def threshold_of(sample: Tensor, share: float) -> float:
    """Returns the magnitude that a share of a sample reaches; 0.0 if all of it does.

    Of `kernels.sampled` elements it is an estimate for all: arXiv:1712.01887, section 3. Of all elements it is exact.
    """
    keep = kept_of(sample.numel(), share)
    return float(sample.abs().topk(keep, sorted=True).values[-1]) if keep < sample.numel() else 0.0


def _sparse(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of chosen elements of each block, their indices in it and the values: int16, int16, bfloat16."""
    blocks = -(-values.numel() // BLOCK)
    counts = torch.bincount(chosen // BLOCK, minlength=blocks).to(torch.int16)
    return counts, (chosen % BLOCK).to(torch.int16), values[chosen].to(torch.bfloat16)


def feedback_select(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gradient to what was kept back, and takes out what reaches the threshold.

    What is taken out is rounded to bfloat16; the rest, the rounding's included, is kept back.

    Args:
        gradient: float32 [n].
        residual: float32 [n]; changed in place.
        threshold: Magnitude from which on an element is taken; elements that are 0 never are.

    Returns:
        Counts by block, indices in the blocks, values: int16 [ceil(n / 4096)], int16 [k], bfloat16 [k].
    """
    residual += gradient
    chosen = ((residual.abs() >= threshold) & (residual != 0)).nonzero().flatten()
    taken = _sparse(residual, chosen)
    residual[chosen] -= taken[2].float()
    return taken


def dgc_select(
    gradient: Tensor, velocity: Tensor, accumulated: Tensor, momentum: float, nesterov: bool, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Applies momentum correction, takes out what reaches the threshold, and masks the momentum there.

    Source: Deep Gradient Compression, arXiv:1712.01887, algorithm 4: u = m u + g, v = v + u (with Nesterov's momentum
    u = m (u + g), v = v + u + g), and momentum factor masking.

    Args:
        gradient: g, float32 [n].
        velocity: u, float32 [n]; changed in place.
        accumulated: v, float32 [n]; changed in place.
        momentum: m.
        nesterov: Whether Nesterov's momentum is corrected.
        threshold: Magnitude of v from which on an element is taken.

    Returns:
        As `feedback_select`.
    """
    if nesterov:
        velocity.add_(gradient).mul_(momentum)
        accumulated.add_(velocity).add_(gradient)
    else:
        velocity.mul_(momentum).add_(gradient)
        accumulated.add_(velocity)
    chosen = ((accumulated.abs() >= threshold) & (accumulated != 0)).nonzero().flatten()
    taken = _sparse(accumulated, chosen)
    accumulated[chosen] -= taken[2].float()
    velocity[chosen] = 0.0
    return taken


def correct(gradient: Tensor, velocity: Tensor, momentum: float, nesterov: bool, out: Tensor) -> None:
    """Puts in `out` what a step of SGD with momentum takes of a gradient, as `torch.optim.SGD` without dampening.

    Source: the local update of arXiv:1712.01887, equation 4: u = m u + g, of which u is taken; with Nesterov's momentum
    u = m (u + g), of which u + g is.

    Args:
        gradient: g, float32 [n].
        velocity: u, float32 [n]; changed in place.
        momentum: m.
        nesterov: Whether it is Nesterov's.
        out: float32 [n]; may be the gradient.
    """
    if nesterov:
        torch.add(gradient, velocity.add_(gradient).mul_(momentum), out=out)
    else:
        out.copy_(velocity.mul_(momentum).add_(gradient))


def add_sparse(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
    """Adds what `feedback_select` has taken to a segment, float32 [n], in place.

    Raises:
        ValueError: if the counts are not those of the indices, or indices are not there or do not ascend; nothing is added then.
    """
    if bool((counts < 0).any()) or int(counts.sum()) != indices.numel() or indices.numel() != values.numel():
        raise ValueError(SPARSE_INVALID)
    blocks = torch.arange(counts.numel(), device=out.device).repeat_interleave(counts.long())
    where = blocks * BLOCK + indices.long()
    if bool(((indices < 0) | (indices >= BLOCK) | (where >= out.numel())).any()) or bool((where.diff() <= 0).any()):
        raise ValueError(SPARSE_INVALID)
    # Not by `index_add_`, which on a GPU adds by atomics, and those take subnormal numbers for zero.
    out[where] += values.float()


def _random(begin: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Returns uniform numbers in [0, 1) of the elements from `begin` on: float32 [count], a function of place and seed.

    A counter and a mixer, so that any rank can compute them again from anywhere: Wellons' `lowbias32`
    (https://nullprogram.com/blog/2018/07/31/), whose upper 24 bits are taken.
    """
    x = torch.arange(begin, begin + count, dtype=torch.int64, device=device)
    x &= _WORD
    x ^= seed & _WORD
    x *= 0x9E3779B1
    x += (seed >> 32) & _WORD
    x &= _WORD
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _WORD
    x ^= x >> 15
    x *= 0x846CA68B
    x &= _WORD
    x ^= x >> 16
    return (x >> 8).float() * 2.0**-24


def quantise(values: Tensor, *, bits: int, block: int, begin: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rounds each block to integers of `bits` bits, up or down at random, so that the mean is exact.

    Source: QSGD, arXiv:1610.02132, equation 1, with the largest magnitude of a block in the place of its L2 norm, and
    L = 2^(bits - 1) - 1 levels.

    Args:
        values: float32 [n].
        bits: 2 to 8.
        block: Elements that share a scale.
        begin: Where the values lie in their bucket; decides about what is random.
        seed: So does it.

    Returns:
        Planes of bits, uint8 [ceil(n / 8) * bits], of which 8 neighbours share `bits` bytes (the lowest bits first; with 8
        bits they are the integers themselves, int8); scales, float32 [ceil(n / block)].
    """
    levels = 2 ** (bits - 1) - 1
    size, rows = values.numel(), -(-values.numel() // block)
    scales = values.new_empty(rows)
    whole = values.new_empty(size, dtype=torch.int8)
    # A CPU does it in pieces that its caches hold, many times as fast.
    step = max(1, _PIECE // block) if values.device.type == "cpu" else max(1, rows)
    for row in range(0, rows, step):
        part = slice(row * block, min((row + step) * block, size))
        found = scales[row : row + step]
        whole[part] = _rounded(values[part], found, levels=levels, block=block, begin=begin + part.start, seed=seed)
    return (whole if bits == 8 else _pack(whole, bits)), scales


def _rounded(values: Tensor, scales: Tensor, *, levels: int, block: int, begin: int, seed: int) -> Tensor:
    """Returns the integers of some blocks, as float32, and writes their scales."""
    quotients, scales[:] = _in_steps(values, levels=levels, block=block)
    drawn = _random(begin, quotients.numel(), seed, values.device).view_as(quotients)
    return torch.floor(quotients + drawn).clamp_(-levels, levels).flatten()[: values.numel()]


def _in_steps(values: Tensor, *, levels: int, block: int) -> tuple[Tensor, Tensor]:
    """Returns values over the step between levels, float32 [blocks, block], and the step of each block, its scale."""
    size = values.numel()
    padded = torch.nn.functional.pad(values, (0, -size % block)).view(-(-size // block), block)
    largest = padded.abs().amax(dim=1)
    # By a tensor: on a GPU, a quotient by a number is a product with its reciprocal, which has other bits.
    scales = largest / largest.new_full((), levels)
    return padded / torch.where(scales > 0, scales, torch.ones_like(scales))[:, None], scales


def nearest(values: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Rounds each block to the nearest of 2^bits - 1 levels about zero, the largest magnitude among them; ties to even.

    No element is further off than half a level, nor than by its own magnitude: it may well become zero. So the error
    is always less than the values are, which error feedback needs (arXiv:1901.09847, definition of a compressor), for
    any number of bits.

    Args:
        values: float32 [n].
        bits: 2 to 8.
        block: Elements that share a scale.

    Returns:
        As `quantise`.
    """
    levels = 2 ** (bits - 1) - 1
    quotients, scales = _in_steps(values, levels=levels, block=block)
    whole = quotients.round_().clamp_(-levels, levels).flatten()[: values.numel()].to(torch.int8)
    return (whole if bits == 8 else _pack(whole, bits)), scales


def _pack(whole: Tensor, bits: int) -> Tensor:
    """Packs signed integers of `bits` bits: of 8 neighbours the lowest bits are one byte, and so on."""
    groups = torch.nn.functional.pad(whole, (0, -whole.numel() % 8)).view(-(-whole.numel() // 8), 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=whole.device)
    planes = [(((groups >> bit) & 1) * weights).sum(dim=1, dtype=torch.uint8) for bit in range(bits)]
    return torch.stack(planes, dim=1).flatten()


def _unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    planes = packed.view(packed.numel() // bits, bits)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    whole = torch.zeros(planes.shape[0], 8, dtype=torch.int16, device=packed.device)
    for bit in range(bits):
        whole |= ((planes[:, bit : bit + 1] >> shifts) & 1).to(torch.int16) << bit
    whole = torch.where(whole >= 2 ** (bits - 1), whole - 2**bits, whole)
    return whole.flatten()[:size]


def add_quantised(packed: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Adds what `quantise` has made to a segment, float32 [n], in place."""
    size = out.numel()
    whole = packed if bits == 8 else _unpack(packed, bits, size)
    out += whole.float() * scales.repeat_interleave(block)[:size]
