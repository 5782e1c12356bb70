# ruff: noqa: N803, N806 (array names end with their shape)
"""The tokens that the losses by covariance treat apart, chosen over all rows of an optimiser step.

A token whose probability and advantage are both high lowers the entropy of the policy: the change of the entropy is
minus the covariance of log-probability and advantage (Cui et al., arXiv:2505.22617). The choice is made before the
passes, so micro-batches and ranks do not change it.

Legend: N trained tokens of all rows, in their order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fulmen_algorithm.losses.entropy_settings import ClipCovLoss, KlCovLoss
from fulmen_algorithm.training.rows import Row


def chosen_tokens(
    rows: Sequence[Row], logprobs: Sequence[Sequence[float]], loss: ClipCovLoss | KlCovLoss, *, seed: int
) -> list[list[bool]]:
    """Chooses the tokens that lose their gradient (`clip_cov`), or have a penalty (`kl_cov`).

    Args:
        rows: *All* rows of the optimiser step, of every rank and micro-batch.
        logprobs: Log-probability of each token of each row under the proximal policy.
        loss: Which tokens, and how many.
        seed: Seed of the draw of `clip_cov`.

    Returns:
        A flag for each token of each row; false where a token does not train.
    """
    masks = [np.asarray(row.loss_mask, dtype=bool) for row in rows]
    logprobs_N = _trained(logprobs, masks)
    advantages_N = _trained([row.advantages for row in rows], masks)
    flags_N = np.zeros(len(logprobs_N), dtype=bool)
    if len(logprobs_N):
        cov_N = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
        flags_N[_chosen(cov_N, loss, seed)] = True
    flags = iter(flags_N.tolist())
    return [[next(flags) if trains else False for trains in mask.tolist()] for mask in masks]


def _chosen(cov_N: NDArray[np.float64], loss: ClipCovLoss | KlCovLoss, seed: int) -> NDArray[np.int64]:
    count = max(int(loss.share * len(cov_N)), 1)
    if isinstance(loss, KlCovLoss):
        return np.argsort(-cov_N, kind="stable")[:count]
    within = np.flatnonzero((cov_N > loss.covariance_low) & (cov_N < loss.covariance_high))
    return np.random.default_rng(seed).permutation(within)[:count]


def _trained(values: Sequence[Sequence[float]], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    parts = [np.asarray(part, dtype=np.float64)[mask] for part, mask in zip(values, masks, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)
