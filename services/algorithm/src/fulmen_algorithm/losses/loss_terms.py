# ruff: noqa: N802, N803, N806, N815 (tensor names end with their shape)
"""Terms per token: policy loss, off-policy weight and KL estimate, each by its formula.

Invariant: at positions that do not train, `TokenBatch` makes the log-probabilities of all policies equal, so that no
term overflows into 0 * inf = nan. The exponent of every ratio is clamped to +-LOG_RATIO_LIMIT; beyond it a ratio is
constant and has no gradient.

Legend: B lines, T positions. A *sequence* is a row: several rows may share a line of a packed micro-batch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

import torch
from torch import Tensor

from fulmen_algorithm.losses.entropy_settings import ClipCovLoss, KlCovLoss
from fulmen_algorithm.losses.objectives import (
    CispoLoss,
    ClipLoss,
    Correction,
    DecoupledCorrection,
    DppoLoss,
    GeometricCorrection,
    GspoLoss,
    IcepopCorrection,
    ImportanceLoss,
    KlEstimator,
    Loss,
    NoCorrection,
    ReinforceLoss,
    SapoLoss,
    SequenceCorrection,
    SequenceMaskCorrection,
    TokenCorrection,
)

LOG_RATIO_LIMIT = 20.0
"""e^20 is 4.9e8, far beyond any meaningful ratio; its square still fits into float32."""


class TokenBatch:
    """The log-probabilities of one micro-batch under every policy, with advantages and mask.

    All tensors have the shape [B, T]; only `pi_BT` has a gradient.

    Attributes:
        pi_BT: Log-probabilities under the trained policy.
        proximal_BT: Log-probabilities under the proximal policy.
        mu_BT: Log-probabilities under the sampler.
        reference_BT: Log-probabilities under the reference policy; None without a KL penalty in the loss.
        advantages_BT: Advantage of each token.
        mask_BT: True where the token trains.
        entropy_BT: Entropy of the trained policy at each token, with gradient; None if it was not measured.
        chosen_BT: True for `losses.covariance.chosen_tokens`; None without a loss that needs them.
    """

    def __init__(
        self,
        *,
        logprobs_BT: Tensor,
        proximal_BT: Tensor,
        sampler_BT: Tensor,
        advantages_BT: Tensor,
        mask_BT: Tensor,
        row_index_BT: Tensor,
        reference_BT: Tensor | None = None,
        entropy_BT: Tensor | None = None,
        chosen_BT: Tensor | None = None,
    ) -> None:
        """`row_index_BT` is the row of each token, negative at padding."""

        def trained(values_BT: Tensor) -> Tensor:
            return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))

        self.pi_BT = trained(logprobs_BT)
        self.proximal_BT = trained(proximal_BT)
        self.mu_BT = trained(sampler_BT)
        self.reference_BT = None if reference_BT is None else trained(reference_BT)
        self.entropy_BT = None if entropy_BT is None else trained(entropy_BT)
        self.chosen_BT = chosen_BT
        self.advantages_BT = trained(advantages_BT)
        self.mask_BT = mask_BT
        self._row_index_BT = row_index_BT

    @cached_property
    def _sequence_BT(self) -> Tensor:
        """Index of each token's row in this micro-batch, from 0; computed lazily."""
        return torch.unique(self._row_index_BT, return_inverse=True)[1]

    def sequence_sum(self, values_BT: Tensor) -> Tensor:
        """Computes for every token the sum over the trained tokens of its row."""
        # The number of rows is at most the number of positions.
        zeros = torch.zeros(values_BT.numel(), dtype=values_BT.dtype, device=values_BT.device)
        masked_BT = torch.where(self.mask_BT, values_BT, zeros.new_zeros(()))
        return zeros.index_add(0, self._sequence_BT.flatten(), masked_BT.flatten())[self._sequence_BT]

    def sequence_mean(self, values_BT: Tensor) -> Tensor:
        """Computes for every token the mean over the trained tokens of its row; 0 for a row without any."""
        return self.sequence_sum(values_BT) / self.sequence_sum(self.mask_BT.to(values_BT.dtype)).clamp(min=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Terms of a policy loss.

    Attributes:
        terms_BT: Loss term per token.
        clipped_BT: True where the clip took the token's gradient, or, for `cispo`, bounded its weight.
    """

    terms_BT: Tensor
    clipped_BT: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of an off-policy correction, which multiply the terms without gradient.

    Attributes:
        weights_BT: Factor per token, 0 where the correction leaves it out.
        capped_BT: True where the weight was truncated.
        dropped_BT: True where the token is left out.
    """

    weights_BT: Tensor
    capped_BT: Tensor
    dropped_BT: Tensor


def loss_terms(batch: TokenBatch, loss: Loss) -> LossTerms:
    """Computes the policy loss of each token; the formulas are those of the settings' docstrings."""
    A_BT = batch.advantages_BT
    match loss:
        case ClipLoss():
            return _clipped(bounded_exp(batch.pi_BT - batch.proximal_BT), A_BT, loss.low, loss.high, loss.dual_clip)
        case GspoLoss():
            return _clipped(_sequence_ratio(batch, loss), A_BT, loss.low, loss.high, None)
        case CispoLoss():
            ratio_BT = bounded_exp(batch.pi_BT - batch.proximal_BT).detach()
            bounded_BT = ratio_BT.clamp(loss.ratio_min, loss.ratio_max)
            return LossTerms(terms_BT=-bounded_BT * A_BT * batch.pi_BT, clipped_BT=bounded_BT != ratio_BT)
        case SapoLoss():
            ratio_BT = bounded_exp(batch.pi_BT - batch.proximal_BT)
            tau_BT = torch.full_like(A_BT, loss.tau_negative).masked_fill(A_BT > 0, loss.tau_positive)
            gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1.0)) * 4.0 / tau_BT
            return _unclipped(-gate_BT * A_BT)
        case ReinforceLoss():
            return _unclipped(-A_BT * batch.pi_BT)
        case ImportanceLoss():
            return _unclipped(-bounded_exp(batch.pi_BT - batch.mu_BT) * A_BT)
        case DppoLoss():
            moved_BT = (batch.pi_BT.exp() - batch.mu_BT.exp()).detach()
            dropped_BT = torch.where(A_BT > 0, moved_BT > loss.high, moved_BT < -loss.low)
            terms_BT = -bounded_exp(batch.pi_BT - batch.proximal_BT) * A_BT
            return LossTerms(terms_BT=torch.where(dropped_BT, 0.0, terms_BT), clipped_BT=dropped_BT)
        case ClipCovLoss():
            kept = _clipped(bounded_exp(batch.pi_BT - batch.proximal_BT), A_BT, loss.low, loss.high, None)
            terms_BT = torch.where(_chosen(batch), 0.0, kept.terms_BT)
            return LossTerms(terms_BT=terms_BT, clipped_BT=kept.clipped_BT | _chosen(batch))
        case KlCovLoss():
            moved_BT = batch.pi_BT - batch.proximal_BT
            held_BT = torch.where(_chosen(batch), loss.coefficient * moved_BT.abs(), 0.0)
            return _unclipped(held_BT - bounded_exp(moved_BT) * A_BT)
        case _:
            assert_never(loss)


@torch.no_grad()
def correction_weights(batch: TokenBatch, correction: Correction) -> Weights:
    """Computes the correction weight of each token; the formulas are those of the settings' docstrings."""
    log_w_BT = batch.proximal_BT - batch.mu_BT
    match correction:
        case NoCorrection():
            return _within(torch.ones_like(log_w_BT))
        case TokenCorrection():
            return _truncated(bounded_exp(log_w_BT), correction.cap)
        case SequenceCorrection():
            return _truncated(bounded_exp(batch.sequence_sum(log_w_BT)), correction.cap)
        case SequenceMaskCorrection():
            return _within(bounded_exp(batch.sequence_sum(log_w_BT)), high=correction.cap)
        case GeometricCorrection():
            kept = _within(bounded_exp(batch.sequence_mean(log_w_BT)), low=correction.low, high=correction.high)
            whole_BT = (~kept.dropped_BT).to(log_w_BT.dtype)
            return Weights(weights_BT=whole_BT, capped_BT=kept.capped_BT, dropped_BT=kept.dropped_BT)
        case IcepopCorrection():
            return _within(bounded_exp(log_w_BT), low=correction.low, high=correction.high)
        case DecoupledCorrection():
            return _within(bounded_exp(log_w_BT), high=correction.cap)
        case _:
            assert_never(correction)


def kl_terms(delta: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates KL(pi || reference) from d = log reference - log pi of tokens that pi sampled.

    Source: J. Schulman, "Approximating KL divergence" (2020): k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1.
    """
    match estimator:
        case KlEstimator.K1:
            return -delta
        case KlEstimator.K2:
            return delta.square() / 2
        case KlEstimator.K3:
            return bounded_exp(delta) - delta - 1


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Computes a ratio of probabilities from its logarithm, within e^-20 and e^20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _chosen(batch: TokenBatch) -> Tensor:
    if batch.chosen_BT is None:
        raise ValueError("A loss by covariance needs the tokens that it chooses.")
    return batch.chosen_BT


def _sequence_ratio(batch: TokenBatch, loss: GspoLoss) -> Tensor:
    mean_BT = batch.sequence_mean(batch.pi_BT - batch.proximal_BT)
    if loss.form == "token":
        # Worth the sequence's ratio, with the gradient of this token alone: sg[s] * pi_t / sg[pi_t].
        mean_BT = mean_BT.detach() + batch.pi_BT - batch.pi_BT.detach()
    return bounded_exp(mean_BT)


def _clipped(ratio_BT: Tensor, A_BT: Tensor, low: float, high: float, dual_clip: float | None) -> LossTerms:
    terms_BT = -torch.minimum(ratio_BT * A_BT, ratio_BT.clamp(1.0 - low, 1.0 + high) * A_BT)
    clipped_BT = ((ratio_BT > 1.0 + high) & (A_BT > 0)) | ((ratio_BT < 1.0 - low) & (A_BT < 0))
    if dual_clip is not None:
        bound_BT = -dual_clip * A_BT
        terms_BT = torch.where(A_BT < 0, torch.minimum(terms_BT, bound_BT), terms_BT)
        clipped_BT |= (A_BT < 0) & (ratio_BT > dual_clip)
    return LossTerms(terms_BT=terms_BT, clipped_BT=clipped_BT.detach())


def _unclipped(terms_BT: Tensor) -> LossTerms:
    return LossTerms(terms_BT=terms_BT, clipped_BT=torch.zeros_like(terms_BT, dtype=torch.bool))


def _truncated(weights_BT: Tensor, cap: float) -> Weights:
    nothing_BT = torch.zeros_like(weights_BT, dtype=torch.bool)
    return Weights(weights_BT=weights_BT.clamp(max=cap), capped_BT=weights_BT > cap, dropped_BT=nothing_BT)


def _within(weights_BT: Tensor, *, low: float | None = None, high: float | None = None) -> Weights:
    """Masks weights beyond the bounds."""
    dropped_BT = torch.zeros_like(weights_BT, dtype=torch.bool)
    if low is not None:
        dropped_BT |= weights_BT < low
    if high is not None:
        dropped_BT |= weights_BT > high
    nothing_BT = torch.zeros_like(dropped_BT)
    return Weights(weights_BT=torch.where(dropped_BT, 0.0, weights_BT), capped_BT=nothing_BT, dropped_BT=dropped_BT)
