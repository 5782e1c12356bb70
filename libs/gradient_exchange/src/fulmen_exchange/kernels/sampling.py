"""Places of the elements from which a threshold is estimated.

One element at random of each of equally long parts (stratified sampling), so that neither the width of a matrix nor the
order of its numbers has a say in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulmen_exchange.kernels.reference import uniform

SAMPLE = 100_000
"""Fewest elements of a sample."""
SELECTED = 1000
"""Fewest elements of a sample that are above the threshold. Their number varies by 3 %, so 0.8 to 1.3 of it is 6 times that."""


def places_of(size: int, share: float, *, seed: int, device: torch.device) -> Tensor | None:
    """Returns the places of a sample, int64 [k], ascending; None if it would be most elements.

    Args:
        size: Elements of the whole.
        share: Share that the threshold is to select.
        seed: Seed of the places; they are the same on every device.
        device: Device of the places.
    """
    part = size // max(SAMPLE, math.ceil(SELECTED / share))
    if part <= 1:
        return None
    count = size // part
    within = (uniform(0, count, seed, device) * part).long()
    return torch.arange(count, device=device) * part + within
