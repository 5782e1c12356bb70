"""The kernels as torch operations, which the compiled ones must match bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096
"""Elements per block of a sparse payload; an index within it fits 16 bits."""
SPARSE_INVALID = "sparse payload with an index that is out of range or not in ascending order"
_WORD = 0xFFFFFFFF
_PIECE = 32_768
"""Elements quantised at a time."""


def count_of(size: int, share: float) -> int:
    """Returns how many elements a share of a sample is, at least one."""
    return max(1, round(share * size))


def threshold_of(sample: Tensor, share: float) -> float:
    """Returns the magnitude that a share of a sample reaches; 0.0 if all of it does.

    Exact for all elements; an estimate for those of `sampling.places_of` (arXiv:1712.01887, section 3).
    """
    keep = count_of(sample.numel(), share)
    return float(sample.abs().topk(keep, sorted=True).values[-1]) if keep < sample.numel() else 0.0


def _sparse(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns counts per block, indices within the block, and values of the chosen elements: int16, int16, bfloat16."""
    blocks = -(-values.numel() // BLOCK)
    counts = torch.bincount(chosen // BLOCK, minlength=blocks).to(torch.int16)
    return counts, (chosen % BLOCK).to(torch.int16), values[chosen].to(torch.bfloat16)


def feedback_select(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gradient to the residual and removes the elements at or above the threshold.

    Removed elements are rounded to bfloat16; the rounding error stays in the residual.

    Args:
        gradient: float32 [n].
        residual: float32 [n]; changed in place.
        threshold: Smallest magnitude to remove; zeros never are.

    Returns:
        Counts per block, indices within the block, values: int16 [ceil(n / 4096)], int16 [k], bfloat16 [k].
    """
    residual += gradient
    chosen = ((residual.abs() >= threshold) & (residual != 0)).nonzero().flatten()
    taken = _sparse(residual, chosen)
    residual[chosen] -= taken[2].float()
    return taken


def dgc_select(
    gradient: Tensor, velocity: Tensor, accumulated: Tensor, momentum: float, nesterov: bool, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Applies momentum correction, removes elements at or above the threshold, and masks the momentum there.

    Source: Deep Gradient Compression, arXiv:1712.01887, algorithm 4: u = m u + g, v = v + u (with Nesterov momentum
    u = m (u + g), v = v + u + g), and momentum factor masking.

    Args:
        gradient: g, float32 [n].
        velocity: u, float32 [n]; changed in place.
        accumulated: v, float32 [n]; changed in place.
        momentum: m.
        nesterov: Whether to correct Nesterov momentum.
        threshold: Smallest magnitude of v to remove.

    Returns:
        See `feedback_select`.
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


def nonzero_select(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the elements that are not zero, rounded to bfloat16; NaN is none of them.

    Args:
        values: float32 [n]; left as it is.

    Returns:
        See `feedback_select`.
    """
    return _sparse(values, (values.abs() > 0).nonzero().flatten())


def correct(gradient: Tensor, velocity: Tensor, momentum: float, nesterov: bool, out: Tensor) -> None:
    """Writes the update of SGD with momentum to `out`, as `torch.optim.SGD` without dampening.

    Source: the local update of arXiv:1712.01887, equation 4: u = m u + g, giving u; with Nesterov momentum u = m (u + g),
    giving u + g.

    Args:
        gradient: g, float32 [n].
        velocity: u, float32 [n]; changed in place.
        momentum: m.
        nesterov: Whether to use Nesterov momentum.
        out: float32 [n]; may be the gradient.
    """
    if nesterov:
        torch.add(gradient, velocity.add_(gradient).mul_(momentum), out=out)
    else:
        out.copy_(velocity.mul_(momentum).add_(gradient))


def add_sparse(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor) -> None:
    """Adds the elements selected by `feedback_select` to a segment, float32 [n], in place.

    Raises:
        ValueError: if the counts do not match the indices, or an index is out of range or not ascending; nothing is added.
    """
    if bool((counts < 0).any()) or int(counts.sum()) != indices.numel() or indices.numel() != values.numel():
        raise ValueError(SPARSE_INVALID)
    blocks = torch.arange(counts.numel(), device=out.device).repeat_interleave(counts.long())
    where = blocks * BLOCK + indices.long()
    if bool(((indices < 0) | (indices >= BLOCK) | (where >= out.numel())).any()) or bool((where.diff() <= 0).any()):
        raise ValueError(SPARSE_INVALID)
    # `index_add_` uses atomics on a GPU, which flush subnormals to zero.
    out[where] += values.float()


def uniform(begin: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Returns uniform random numbers in [0, 1), float32 [count], as a function of index and seed.

    A counter and a mixer, so that any rank can recompute any part: Wellons' `lowbias32`
    (https://nullprogram.com/blog/2018/07/31/), upper 24 bits.
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
    """Rounds each block stochastically to integers of `bits` bits, without bias.

    Source: QSGD, arXiv:1610.02132, equation 1, with the largest magnitude of a block instead of its L2 norm, and
    L = 2^(bits - 1) - 1 levels.

    Args:
        values: float32 [n].
        bits: 2 to 8.
        block: Elements that share a scale.
        begin: First element in the bucket; input of the random numbers.
        seed: Seed of the random numbers.

    Returns:
        Bit planes, uint8 [ceil(n / 8) * bits], in which 8 neighbours share `bits` bytes, lowest bits first (with 8 bits the
        integers themselves, int8); scales, float32 [ceil(n / block)].
    """
    levels = 2 ** (bits - 1) - 1
    size, rows = values.numel(), -(-values.numel() // block)
    scales = values.new_empty(rows)
    whole = values.new_empty(size, dtype=torch.int8)
    # On a CPU, pieces that fit the caches are many times faster.
    step = max(1, _PIECE // block) if values.device.type == "cpu" else max(1, rows)
    for row in range(0, rows, step):
        part = slice(row * block, min((row + step) * block, size))
        found = scales[row : row + step]
        whole[part] = _rounded(values[part], found, levels=levels, block=block, begin=begin + part.start, seed=seed)
    return (whole if bits == 8 else _pack(whole, bits)), scales


def _rounded(values: Tensor, scales: Tensor, *, levels: int, block: int, begin: int, seed: int) -> Tensor:
    """Returns the integers of some blocks as float32, and writes their scales."""
    quotients, scales[:] = _in_steps(values, levels=levels, block=block)
    drawn = uniform(begin, quotients.numel(), seed, values.device).view_as(quotients)
    return torch.floor(quotients + drawn).clamp_(-levels, levels).flatten()[: values.numel()]


def _in_steps(values: Tensor, *, levels: int, block: int) -> tuple[Tensor, Tensor]:
    """Returns values divided by the step between levels, float32 [blocks, block], and the step (scale) of each block."""
    size = values.numel()
    padded = torch.nn.functional.pad(values, (0, -size % block)).view(-(-size // block), block)
    largest = padded.abs().amax(dim=1)
    # Divide by a tensor: on a GPU, division by a number multiplies by its reciprocal, with different bits.
    scales = largest / largest.new_full((), levels)
    return padded / torch.where(scales > 0, scales, torch.ones_like(scales))[:, None], scales


def nearest(values: Tensor, *, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Rounds each block to the nearest of 2^bits - 1 levels about zero; the largest magnitude is a level; ties to even.

    The error of an element is at most half a level and at most its own magnitude. So the total error is less than the
    values for any number of bits, as error feedback requires (arXiv:1901.09847, definition of a compressor).

    Args:
        values: float32 [n].
        bits: 2 to 8.
        block: Elements that share a scale.

    Returns:
        See `quantise`.
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
    """Adds quantised elements to a segment, float32 [n], in place."""
    size = out.numel()
    whole = packed if bits == 8 else _unpack(packed, bits, size)
    out += whole.float() * scales.repeat_interleave(block)[:size]
