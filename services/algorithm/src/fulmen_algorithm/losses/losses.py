# ruff: noqa: N803, N806 (tensor names end with their shape)
"""Losses are sums of per-token terms times weights that are normalised over the whole batch.

Only `token_weights` normalises, over *all* rows of the optimiser step. So splitting a batch into micro-batches or over
ranks changes neither the loss nor the gradient.

Legend: B lines, T positions. The policies are those of `losses.objectives`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from fulmen_algorithm.losses.loss_terms import TokenBatch, bounded_exp, correction_weights, kl_terms, loss_terms
from fulmen_algorithm.losses.objectives import (
    Aggregation,
    LossKl,
    Objective,
    PerRolloutMean,
    PromptMean,
    Proximal,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    TokenMean,
)
from fulmen_algorithm.training.rows import Row


def token_weights(rows: Sequence[Row], aggregation: Aggregation) -> list[float]:
    """Computes the loss weight of each trained token of each row.

    The weights of all trained tokens sum to 1; for `sequence_mean_token_sum_norm`, to the mean number of trained tokens
    per row divided by `length`. Rows, rollouts and prompts without a trained token do not count.

    Args:
        rows: *All* rows of the optimiser step, of every rank and micro-batch.
        aggregation: How tokens are weighted.

    Raises:
        ValueError: if the aggregation lacks its `length`.
    """
    match aggregation:
        case TokenMean():
            return _mean_of_means(rows, lambda _index, _row: "")
        case PerRolloutMean():
            return _mean_of_means(rows, lambda _index, row: row.rollout_id)
        case PromptMean():
            # A rollout without a group is its own group; the prefix separates the two kinds of names.
            return _mean_of_means(rows, lambda _index, row: f"g{row.group}" if row.group else f"r{row.rollout_id}")
        case SequenceMeanTokenMean():
            return _mean_of_means(rows, lambda index, _row: str(index))
        case SequenceMeanTokenSumNorm(length=length):
            if length is None:
                raise ValueError("The aggregation sequence_mean_token_sum_norm needs a length outside of a run.")
            sequences = sum(1 for row in rows if row.trained_tokens)
            return [1.0 / (sequences * length) if row.trained_tokens else 0.0 for row in rows]
        case _:
            assert_never(aggregation)


def _mean_of_means(rows: Sequence[Row], unit: Callable[[int, Row], str]) -> list[float]:
    """Gives all units the same weight, and all trained tokens within a unit."""
    tokens: Counter[str] = Counter()
    for index, row in enumerate(rows):
        tokens[unit(index, row)] += row.trained_tokens
    units = sum(1 for n in tokens.values() if n)
    return [1.0 / (n * units) if (n := tokens[unit(i, row)]) else 0.0 for i, row in enumerate(rows)]


def policy_loss(batch: TokenBatch, *, weights_BT: Tensor, objective: Objective) -> Tensor:
    """Computes sum_t weight_t * (correction_t * term_t + coefficient * KL_t - entropy_coefficient * H_t).

    Args:
        batch: One micro-batch under every policy.
        weights_BT: `token_weights`; 0 at positions that do not train.
        objective: Loss, correction and KL penalty; a KL penalty in the reward is already part of the advantages.

    Returns:
        A scalar with gradient.

    Raises:
        ValueError: if the objective has a KL penalty and there are no reference log-probabilities, or a weight of the
            entropy and there are no entropies, or a loss by covariance and no tokens were chosen.
    """
    terms_BT = loss_terms(batch, objective.loss).terms_BT * correction_weights(batch, objective.correction).weights_BT
    if isinstance(objective.kl, LossKl):
        if batch.reference_BT is None:
            raise ValueError("A KL penalty needs the log-probabilities of the reference policy.")
        penalty_BT = kl_terms(batch.reference_BT - batch.pi_BT, objective.kl.estimator)
        if objective.kl.weighted:
            penalty_BT = penalty_BT * bounded_exp(batch.pi_BT - batch.proximal_BT)
        terms_BT = terms_BT + objective.kl.coefficient * penalty_BT
    if objective.entropy_coefficient:
        if batch.entropy_BT is None:
            raise ValueError("A weight of the entropy needs the entropies.")
        terms_BT = terms_BT - objective.entropy_coefficient * batch.entropy_BT
    return (terms_BT * weights_BT).sum()


def cross_entropy_loss(*, logprobs_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Computes the weighted negative log-likelihood; a scalar in nats."""
    return -(torch.where(weights_BT > 0, logprobs_BT, 0.0) * weights_BT).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums and maxima over trained tokens, which add up over micro-batches and ranks; see `loss_metrics`.

    Attributes:
        tokens: Number of trained tokens.
        clipped: Tokens whose gradient the clip removed (for `cispo`: whose weight it bounded).
        capped: Tokens whose importance weight was truncated.
        dropped: Tokens that the correction left out.
        abs_delta: Sum of |trainer - sampler| log-probability.
        kl_sampler_k1: Sum of the k1 estimate of KL(sampler || trainer).
        kl_sampler: Sum of the k3 estimate of the same.
        weight: Sum of importance weights trainer / sampler, before the correction.
        weight_squared: Sum of their squares.
        kl_reference: Sum of the KL estimate against the reference.
        neg_logprob: Sum of -log-probability of the sampled tokens (an entropy estimate).
        entropy: Sum of the entropies; None if they were not measured.
        staleness: Sum of version lags.
        max_abs_delta: Largest |trainer - sampler|.
        max_weight: Largest importance weight.
        max_staleness: Largest version lag.
    """

    tokens: float
    clipped: float
    capped: float
    dropped: float
    abs_delta: float
    kl_sampler_k1: float
    kl_sampler: float
    weight: float
    weight_squared: float
    kl_reference: float
    neg_logprob: float
    staleness: float
    max_abs_delta: float
    max_weight: float
    max_staleness: float
    entropy: float | None = None


@torch.no_grad()
def token_sums(batch: TokenBatch, *, versions_BT: Tensor, current_version: int, objective: Objective) -> TokenSums:
    """Sums what `loss_metrics` reports over the trained tokens of one micro-batch.

    The trainer that the sampler is compared with is the proximal policy; where the sampler stands in for that one, it
    is the trained policy.
    """
    mask_BT = batch.mask_BT
    correction = correction_weights(batch, objective.correction)
    trainer_BT = batch.pi_BT if objective.proximal is Proximal.SAMPLER else batch.proximal_BT
    delta = (trainer_BT - batch.mu_BT)[mask_BT].double()
    importance = delta.exp()
    lag = (current_version - versions_BT[mask_BT]).double().clamp(min=0)
    kl_reference = 0.0
    if isinstance(objective.kl, LossKl) and batch.reference_BT is not None:
        distance = (batch.reference_BT - batch.pi_BT)[mask_BT].double()
        kl_reference = float(kl_terms(distance, objective.kl.estimator).sum())
    return TokenSums(
        tokens=float(mask_BT.sum()),
        clipped=float(loss_terms(batch, objective.loss).clipped_BT[mask_BT].sum()),
        capped=float(correction.capped_BT[mask_BT].sum()),
        dropped=float(correction.dropped_BT[mask_BT].sum()),
        abs_delta=float(delta.abs().sum()),
        kl_sampler_k1=float(-delta.sum()),
        kl_sampler=float((importance - delta - 1).sum()),
        weight=float(importance.sum()),
        weight_squared=float(importance.square().sum()),
        kl_reference=kl_reference,
        neg_logprob=float(-batch.pi_BT[mask_BT].double().sum()),
        staleness=float(lag.sum()),
        max_abs_delta=_largest(delta.abs()),
        max_weight=_largest(importance),
        max_staleness=_largest(lag),
        entropy=None if batch.entropy_BT is None else float(batch.entropy_BT[mask_BT].double().sum()),
    )


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def loss_metrics(sums: Sequence[TokenSums], *, positions: int) -> dict[str, float]:
    """Turns the sums of all micro-batches of a step into means per trained token.

    Args:
        sums: One entry per micro-batch and rank.
        positions: Tokens of the rows, trained or not; `masked_share` is the part that does not train.
    """
    tokens = sum(s.tokens for s in sums)
    if not tokens:
        return {"tokens": 0.0, "masked_share": 1.0}
    weight, squared = sum(s.weight for s in sums), sum(s.weight_squared for s in sums)
    entropies = [s.entropy for s in sums if s.entropy is not None]
    return {
        "tokens": tokens,
        "masked_share": 1.0 - tokens / positions,
        "clipped_share": sum(s.clipped for s in sums) / tokens,
        "capped_share": sum(s.capped for s in sums) / tokens,
        "correction_masked_share": sum(s.dropped for s in sums) / tokens,
        "abs_logprob_delta": sum(s.abs_delta for s in sums) / tokens,
        "abs_logprob_delta_max": max(s.max_abs_delta for s in sums),
        # KL(sampler || trainer) in nats per token: k1 is unbiased and may be negative, k3 never is.
        "kl_sampler_trainer_k1": sum(s.kl_sampler_k1 for s in sums) / tokens,
        "kl_sampler_trainer": sum(s.kl_sampler for s in sums) / tokens,
        "importance_mean": weight / tokens,
        "importance_max": max(s.max_weight for s in sums),
        # chi^2(trainer || sampler) = E_sampler[w^2] - 1.
        "chi_squared": squared / tokens - 1.0,
        # Kish's effective sample size as a share of the tokens: 1 means that sampler and trainer agree.
        "effective_sample_share": weight * weight / (squared * tokens) if squared else 0.0,
        "kl_reference": sum(s.kl_reference for s in sums) / tokens,
        "entropy_estimate": sum(s.neg_logprob for s in sums) / tokens,
        # Nats per token, summed over the vocabulary: the estimate has the same mean, and noise.
        **({"entropy": sum(entropies) / tokens} if entropies else {}),
        "staleness_mean": sum(s.staleness for s in sums) / tokens,
        "staleness_max": max(s.max_staleness for s in sums),
    }
