"""The loops over every element of a gradient: compiled for CPUs and GPUs where that can be had, else in torch's operations.

All of them give the same bits. Tensors are float32 and contiguous; nothing is allocated that could be reused.
"""

from __future__ import annotations

from fulmen_algorithm.exchange.kernels.reference import (
    add_quantised,
    add_sparse,
    dgc_select,
    feedback_select,
    quantise,
    sampled,
    threshold_of,
)

__all__ = ["add_quantised", "add_sparse", "dgc_select", "feedback_select", "quantise", "sampled", "threshold_of"]
