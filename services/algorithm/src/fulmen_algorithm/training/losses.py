# ruff: noqa: N803, N806 (tensor names end with their shape)
"""Losses are sums of per-token terms times weights that were normalised over the whole batch beforehand.

So cutting a batch into micro-batches, or over ranks, changes neither the loss nor the gradient.

Legend: B lines, T positions. Three policies: the trained one, the *proximal* one (the trained one when the batch
began) and the *sampler* (the engine's, maybe some versions older).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from fulmen_algorithm.training.rows import Row


class Aggregation(StrEnum):
    """How token terms become one number."""

    TOKEN_MEAN = "token_mean"  # noqa: S105 (not a secret)
    PER_ROLLOUT_MEAN = "per_rollout_mean"


class KlEstimator(StrEnum):
    """Estimator of KL(trained || reference) per token; d = log reference - log trained."""

    NONE = "none"
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of the policy loss; the defaults are the vetted ones.

    Attributes:
        clip_low: The ratio counts no lower than 1 - clip_low.
        clip_high: The ratio counts no higher than 1 + clip_high (clip-higher of DAPO, arXiv:2503.14476).
        importance_cap: C of token-level truncated importance sampling (proximal / sampler); None switches it off.
        aggregation: Token mean for single-turn tasks, per-rollout mean for multi-turn ones.
        kl: Estimator of the penalty against the reference policy.
        kl_coefficient: Weight of that penalty.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float | None = 2.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    kl: KlEstimator = KlEstimator.NONE
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums over trained tokens, which add up over micro-batches; `loss_metrics` turns them into means.

    Attributes:
        tokens: Number of trained tokens.
        clipped: Tokens whose gradient the clip removed.
        capped: Tokens whose importance weight was truncated.
        abs_delta: Sum of |proximal - sampler| log-probability.
        kl_sampler: Sum of the k3 estimate of KL(sampler || proximal).
        weight: Sum of importance weights before the cap.
        weight_squared: Sum of their squares.
        kl_reference: Sum of the KL estimate against the reference.
        neg_logprob: Sum of -log-probability of the sampled tokens (an entropy estimate).
        staleness: Sum of version lags.
        max_staleness: Largest version lag.
    """

    tokens: float
    clipped: float
    capped: float
    abs_delta: float
    kl_sampler: float
    weight: float
    weight_squared: float
    kl_reference: float
    neg_logprob: float
    staleness: float
    max_staleness: float


def token_weights(rows: Sequence[Row], aggregation: Aggregation) -> list[float]:
    """Gives the weight of each trained token of each row; over all rows they sum to 1.

    Token mean: 1 / tokens. Per-rollout mean: 1 / (tokens of the rollout * rollouts), so that neither the length of a
    rollout nor the number of rows it was cut into changes its share.

    Args:
        rows: *All* rows of the optimiser step, of every rank and micro-batch.
        aggregation: Which of the two.
    """
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            total = sum(row.trained_tokens for row in rows)
            return [1.0 / total if total else 0.0] * len(rows)
        case Aggregation.PER_ROLLOUT_MEAN:
            tokens: Counter[str] = Counter()
            for row in rows:
                tokens[row.rollout_id] += row.trained_tokens
            rollouts = sum(1 for n in tokens.values() if n)
            return [1.0 / (n * rollouts) if (n := tokens[row.rollout_id]) else 0.0 for row in rows]


def policy_loss(
    *,
    logprobs_BT: Tensor,
    proximal_BT: Tensor,
    sampler_BT: Tensor,
    advantages_BT: Tensor,
    weights_BT: Tensor,
    settings: LossSettings,
    reference_BT: Tensor | None = None,
) -> Tensor:
    """Computes the clipped policy loss with truncated importance sampling.

    With r = trained / proximal and w = min(proximal / sampler, C):
    loss = sum_t weight_t * (-w_t * min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) + beta * KL_t).

    Args:
        logprobs_BT: Log-probabilities under the trained policy, with gradient.
        proximal_BT: The same at the start of the batch, without gradient.
        sampler_BT: Under the sampling policy.
        advantages_BT: Advantage of each token's rollout.
        weights_BT: `token_weights`, and 0 wherever nothing trains.
        settings: Clip, cap, KL.
        reference_BT: Under the frozen reference; needed for a KL penalty.

    Returns:
        A scalar with gradient.

    Raises:
        ValueError: if a KL penalty is asked for without reference log-probabilities.

    Source: PPO (arXiv:1707.06347) eq. 7; DAPO (arXiv:2503.14476) eq. 8; truncated importance sampling as in
    "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al., 2025).
    """
    mask_BT = weights_BT > 0
    # Where nothing trains the difference is set to 0 first, so that exp() cannot overflow into 0 * inf = nan.
    ratio_BT = torch.where(mask_BT, logprobs_BT - proximal_BT, 0.0).exp()
    clipped_BT = ratio_BT.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    terms_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if settings.importance_cap is not None:
        importance_BT = torch.where(mask_BT, proximal_BT - sampler_BT, 0.0).exp()
        terms_BT = terms_BT * importance_BT.clamp(max=settings.importance_cap)
    if settings.kl is not KlEstimator.NONE:
        if reference_BT is None:
            raise ValueError("A KL penalty needs the log-probabilities of the reference policy.")
        delta_BT = torch.where(mask_BT, reference_BT - logprobs_BT, 0.0)
        terms_BT = terms_BT + settings.kl_coefficient * kl_estimate(delta_BT, settings.kl)
    return (terms_BT * weights_BT).sum()


def kl_estimate(delta: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates KL(trained || reference) from d = log reference - log trained of tokens sampled by the trained policy.

    Source: J. Schulman, "Approximating KL divergence" (2020): k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1.
    """
    match estimator:
        case KlEstimator.NONE:
            return torch.zeros_like(delta)
        case KlEstimator.K1:
            return -delta
        case KlEstimator.K2:
            return delta.square() / 2
        case KlEstimator.K3:
            return delta.exp() - delta - 1


def cross_entropy_loss(*, logprobs_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Computes the weighted negative log-likelihood; a scalar in nats."""
    return -(torch.where(weights_BT > 0, logprobs_BT, 0.0) * weights_BT).sum()


@torch.no_grad()
def token_sums(
    *,
    logprobs_BT: Tensor,
    proximal_BT: Tensor,
    sampler_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    versions_BT: Tensor,
    current_version: int,
    settings: LossSettings,
    reference_BT: Tensor | None = None,
) -> TokenSums:
    """Sums what `loss_metrics` reports over the trained tokens of one micro-batch; shapes as in `policy_loss`."""
    logprobs, proximal = logprobs_BT[mask_BT].double(), proximal_BT[mask_BT].double()
    sampler, advantages = sampler_BT[mask_BT].double(), advantages_BT[mask_BT].double()
    ratio = (logprobs - proximal).exp()
    too_high = (ratio > 1.0 + settings.clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - settings.clip_low) & (advantages < 0)
    delta = proximal - sampler
    importance = delta.exp()
    cap = settings.importance_cap
    lag = (current_version - versions_BT[mask_BT]).double().clamp(min=0)
    reference = torch.zeros_like(logprobs)
    if reference_BT is not None:
        reference = kl_estimate(reference_BT[mask_BT].double() - logprobs, settings.kl)
    return TokenSums(
        tokens=float(mask_BT.sum()),
        clipped=float((too_high | too_low).sum()),
        capped=0.0 if cap is None else float((importance > cap).sum()),
        abs_delta=float(delta.abs().sum()),
        kl_sampler=float((importance - delta - 1).sum()),
        weight=float(importance.sum()),
        weight_squared=float(importance.square().sum()),
        kl_reference=float(reference.sum()),
        neg_logprob=float(-logprobs.sum()),
        staleness=float(lag.sum()),
        max_staleness=float(lag.max()) if lag.numel() else 0.0,
    )


def loss_metrics(sums: Sequence[TokenSums], *, positions: int) -> dict[str, float]:
    """Turns the sums of all micro-batches of a step into means per trained token.

    Args:
        sums: One entry per micro-batch.
        positions: Tokens of the rows, trained or not; `masked_share` is the part that does not train.
    """
    tokens = sum(s.tokens for s in sums)
    if not tokens:
        return {"tokens": 0.0, "masked_share": 1.0}
    weight, squared = sum(s.weight for s in sums), sum(s.weight_squared for s in sums)
    return {
        "tokens": tokens,
        "masked_share": 1.0 - tokens / positions,
        "clipped_share": sum(s.clipped for s in sums) / tokens,
        "capped_share": sum(s.capped for s in sums) / tokens,
        "abs_logprob_delta": sum(s.abs_delta for s in sums) / tokens,
        "kl_sampler_trainer": sum(s.kl_sampler for s in sums) / tokens,
        "importance_mean": weight / tokens,
        # Kish's effective sample size as a share of the tokens: 1 means that sampler and trainer agree.
        "effective_sample_share": weight * weight / (squared * tokens) if squared else 0.0,
        "kl_reference": sum(s.kl_reference for s in sums) / tokens,
        "entropy_estimate": sum(s.neg_logprob for s in sums) / tokens,
        "staleness_mean": sum(s.staleness for s in sums) / tokens,
        "staleness_max": max(s.max_staleness for s in sums),
    }
