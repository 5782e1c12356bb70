# ruff: noqa: N803, N806 (tensor names end with their shape)
"""The entropy of the distributions at given positions, from logits that are not kept.

Legend: N positions, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor


class _Entropy(torch.autograd.Function):
    """H = sum_v -p_v log p_v, whose slope by a logit is -p_v (log p_v + H).

    Autograd alone would keep two more tensors of V numbers for each position.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, normaliser_N: Tensor) -> Tensor:
        entropy_N = _terms(logits_NV, normaliser_N)[1].sum(-1)
        ctx.save_for_backward(logits_NV, normaliser_N, entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        logits_NV, normaliser_N, entropy_N = ctx.saved_tensors
        p_NV, terms_NV = _terms(logits_NV, normaliser_N)
        return slopes[0][:, None] * (terms_NV - p_NV * entropy_N[:, None]), None


def _terms(logits_NV: Tensor, normaliser_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns p and -p log p; the latter is 0 where p is 0, as for a logit of -inf."""
    p_NV = (logits_NV - normaliser_N[:, None]).exp_()
    return p_NV, torch.special.entr(p_NV)


def entropy_of(logits_NV: Tensor, normaliser_N: Tensor) -> Tensor:
    """Computes the entropy of softmax(logits), in nats, with gradient by the logits.

    Args:
        logits_NV: Logits, divided by the temperature.
        normaliser_N: Their log-sum-exp; no gradient flows through it.

    Returns:
        [N].
    """
    found_N: Tensor = _Entropy.apply(logits_NV, normaliser_N.detach())
    return found_N
