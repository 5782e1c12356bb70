"""Deep gradient compression as its paper has it."""

from __future__ import annotations

import numpy as np


def bfloat16(values):
    """Rounds float64 to bfloat16, ties to even."""
    words = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def published(u, v, g, m, *, nesterov, sent):
    """One step of algorithm 4 of arXiv:1712.01887 (of algorithm 5, with Nesterov's momentum), float64, plainly.

    Args:
        sent: Says of v which elements go; the paper sorts for it.

    Returns:
        u, v, and what is sent. What rounding to bfloat16 leaves stays in v, where the paper sends float32.
    """
    if nesterov:
        u = m * (u + g)
        v = v + u + g
    else:
        u = m * u + g
        v = v + u
    mask = sent(v)
    out = np.where(mask, bfloat16(v), 0.0)
    return np.where(mask, 0.0, u), v - out, out
