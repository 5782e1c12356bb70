"""Rounds float32 to bfloat16 at random, so that what is rounded has the value that it had on average."""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 2**20
"""Elements that are rounded at a time, which bounds the memory that it takes."""
LARGEST = torch.finfo(torch.bfloat16).max
UPPER = -(2**16)
"""Mask of the upper half of 32 bits."""


def round_at_random(values: Tensor, out: Tensor, seed: int) -> None:
    """Writes values, float32 [n], to bfloat16 [n]; the seed decides which of its two neighbours each becomes, on each kind of device.

    bfloat16 is the upper half of float32: a carry from the lower half, to which up to 2^16 - 1 is added, rounds up. Values
    beyond the largest become that, so that none becomes infinite.
    """
    chance = torch.Generator(device=values.device).manual_seed(seed)
    for begin in range(0, values.numel(), RUN):
        part = values[begin : begin + RUN].clamp(-LARGEST, LARGEST)
        bits = torch.randint(2**16, part.shape, generator=chance, dtype=torch.int32, device=part.device)
        bits += part.view(torch.int32)
        bits &= UPPER
        out[begin : begin + RUN] = bits.view(torch.float32)  # exact: the lower half is zero
