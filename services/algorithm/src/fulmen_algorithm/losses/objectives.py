"""The objective: settings of the loss, the off-policy correction, the KL penalty and the aggregation.

Each has a kind and the settings of that kind; unused settings are errors. Importable without torch. There are three
policies: the trained one (pi), the *proximal* one (pi at the start of the batch) and the *sampler* (mu, the engine's,
possibly some versions older).
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fulmen_algorithm.losses.entropy_settings import ClipCovLoss, KlCovLoss
from fulmen_algorithm.training.strict import NONE_BY_NAME, Strict

Positive = Annotated[float, Field(gt=0)]


class ClipLoss(Strict):
    """Clipped ratio r = pi / proximal per token: -min(r A, clip(r, 1 - low, 1 + high) A).

    Attributes:
        low: Lower bound of the ratio is 1 - low.
        high: Upper bound of the ratio is 1 + high (clip-higher of DAPO).
        dual_clip: c, which bounds the loss by -c A where A < 0; null for no bound.

    Source: PPO (arXiv:1707.06347) eq. 7; DAPO (arXiv:2503.14476) eq. 8; dual clip (arXiv:1912.09729).
    """

    kind: Literal["clip"] = "clip"
    low: float = Field(default=0.2, gt=0, lt=1)
    high: float = Field(default=0.28, gt=0, le=10)
    dual_clip: float | None = Field(default=None, gt=1)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "ClipLoss":
        if self.dual_clip is not None and self.dual_clip <= 1 + self.high:
            raise ValueError("dual_clip must be greater than 1 + high")
        return self


class GspoLoss(Strict):
    """Clipped ratio of a sequence, s = exp(mean_t log r_t), shared by all its tokens.

    Attributes:
        low: Lower bound of s is 1 - low.
        high: Upper bound of s is 1 + high.
        form: `sequence`, or `token` for a separate gradient per token with the same value of s; they differ only if the
            advantages within a sequence do.

    Source: GSPO (arXiv:2507.18071) eq. 5 to 7 and, for the token form, eq. 13 and 14; its experiments use these
    numbers.
    """

    kind: Literal["gspo"] = "gspo"
    low: float = Field(default=3e-4, gt=0, lt=1)
    high: float = Field(default=4e-4, gt=0, le=10)
    form: Literal["sequence", "token"] = "sequence"


class CispoLoss(Strict):
    """Clips the weight and keeps every token's gradient: -stop_gradient(clip(r, ratio_min, ratio_max)) A log pi.

    Attributes:
        ratio_min: Lower bound of the ratio itself; 0 for none.
        ratio_max: Upper bound of the ratio itself.

    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5; the upper bound is the one of ScaleRL (arXiv:2510.13786).
    """

    kind: Literal["cispo"] = "cispo"
    ratio_min: float = Field(default=0.0, ge=0, le=1)
    ratio_max: float = Field(default=5.0, ge=1)


class SapoLoss(Strict):
    """A soft gate instead of the clip: -(4 / tau) sigmoid(tau (r - 1)) A.

    Attributes:
        tau_positive: tau where A > 0.
        tau_negative: tau elsewhere; the larger, the sooner a token that moved away loses its weight.

    Source: SAPO (arXiv:2511.20347).
    """

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


class ReinforceLoss(Strict):
    """The plain policy gradient: -A log pi. Source: Williams (1992); GPG (arXiv:2504.02546)."""

    kind: Literal["reinforce"] = "reinforce"


class ImportanceLoss(Strict):
    """The policy gradient with the full importance weight: -(pi / mu) A, neither clipped nor capped.

    It is its own off-policy correction, so `correction` must be `none`. Source: the `importance_sampling` loss of
    Tinker.
    """

    kind: Literal["importance"] = "importance"


class DppoLoss(Strict):
    """Drops tokens whose probability moved too far, without clipping: -keep (pi / proximal) A.

    A token is kept if A > 0 and pi - mu <= high, or A <= 0 and pi - mu >= -low. The criterion is the total variation
    instead of the ratio, so that rare tokens are kept.

    Attributes:
        low: Maximum decrease of the probability.
        high: Maximum increase of the probability.

    Source: DPPO with total variation, the default loss of prime-rl.
    """

    kind: Literal["dppo"] = "dppo"
    low: float = Field(default=0.2, gt=0, le=1)
    high: float = Field(default=0.2, gt=0, le=1)


Loss = Annotated[
    ClipLoss | GspoLoss | CispoLoss | SapoLoss | ReinforceLoss | ImportanceLoss | DppoLoss | ClipCovLoss | KlCovLoss,
    Field(discriminator="kind"),
]


class NoCorrection(Strict):
    """No correction: rows are treated as if the proximal policy had sampled them."""

    kind: Literal["none"] = "none"


class TokenCorrection(Strict):
    """Truncated importance sampling per token: min(w_t, cap), w = proximal / mu.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).

    Attributes:
        cap: Upper bound of a weight.
    """

    kind: Literal["token"] = "token"
    cap: Positive = 2.0


class SequenceCorrection(Strict):
    """Truncated importance sampling per sequence: min(prod_t w_t, cap) for every token of a row.

    Source: Liu et al., "When speed kills stability" (2025), sequence-level truncated importance sampling.

    Attributes:
        cap: Upper bound of a weight.
    """

    kind: Literal["sequence"] = "sequence"
    cap: Positive = 2.0


class SequenceMaskCorrection(Strict):
    """Masked importance sampling: prod_t w_t if at most `cap`; other rows are left out.

    Source: Liu et al., "When speed kills stability" (2025), sequence-level masked importance sampling.

    Attributes:
        cap: Product of weights above which a row is left out.
    """

    kind: Literal["sequence_mask"] = "sequence_mask"
    cap: Positive = 3.0


class GeometricCorrection(Strict):
    """Leaves out rows whose exp(mean_t log w_t) is outside the bounds; the others have weight 1.

    The mean does not grow with the length, so long rows are not left out more often.

    Attributes:
        low: Lower bound.
        high: Upper bound.

    Source: Liu et al., "When speed kills stability" (2025), geometric sequence mask.
    """

    kind: Literal["geometric"] = "geometric"
    low: float = Field(default=0.99, gt=0, lt=1)
    high: float = Field(default=1.01, gt=1)


class IcepopCorrection(Strict):
    """w_t per token if within the bounds; other tokens are left out.

    Attributes:
        low: Lower bound.
        high: Upper bound.

    Source: IcePop (Ling team, "Small leak can sink a great ship", 2025).
    """

    kind: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, ge=0, lt=1)
    high: float = Field(default=5.0, gt=1)


class DecoupledCorrection(Strict):
    """Decoupled PPO: (proximal / mu) min(r A, clip(r) A) with r = pi / proximal, for the `clip` loss.

    Attributes:
        cap: Tokens with a larger weight are left out, as in AReaL; `"none"` for the formula of the paper.

    Source: AReaL (arXiv:2505.24298) eq. 5; Hilton et al. (arXiv:2110.00641).
    """

    kind: Literal["decoupled"] = "decoupled"
    cap: Annotated[float | None, NONE_BY_NAME] = Field(default=5.0, gt=0)


Correction = Annotated[
    NoCorrection
    | TokenCorrection
    | SequenceCorrection
    | SequenceMaskCorrection
    | GeometricCorrection
    | IcepopCorrection
    | DecoupledCorrection,
    Field(discriminator="kind"),
]


class KlEstimator(StrEnum):
    """Estimator of KL(pi || reference) per token; d = log reference - log pi."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class NoKl(Strict):
    """No penalty, and no reference policy is loaded."""

    kind: Literal["none"] = "none"


class LossKl(Strict):
    """Adds coefficient * estimate to the loss of each token.

    Attributes:
        estimator: `k2` has the gradient of the divergence for rows sampled by pi; `k3` is the estimator of GRPO and
            is never negative; `k1` is unbiased in value, but its expected gradient is zero.
        coefficient: Weight of the penalty.
        weighted: Multiplies the estimate by pi / proximal, including its gradient; `k1` and `k3` then have the gradient
            of the divergence in expectation over rows sampled by the proximal policy. `k2` needs no weight.

    Source: GRPO (arXiv:2402.03300) eq. 3 and 4; J. Schulman, "Approximating KL divergence" (2020); the weight is that
    of DeepSeek-V3.2 (arXiv:2512.02556).
    """

    kind: Literal["loss"] = "loss"
    estimator: KlEstimator = KlEstimator.K3
    coefficient: Positive = 1e-3
    weighted: bool = False


class RewardKl(Strict):
    """Subtracts coefficient * (log mu - log reference) of each sampled token from the reward, before advantages.

    Attributes:
        coefficient: Weight of the penalty.

    Source: InstructGPT (arXiv:2203.02155) eq. 2, with the policy that sampled the token.
    """

    kind: Literal["reward"] = "reward"
    coefficient: Positive = 1e-3


Kl = Annotated[NoKl | LossKl | RewardKl, Field(discriminator="kind")]


class TokenMean(Strict):
    """All trained tokens of the optimiser step have the same weight. Source: DAPO (arXiv:2503.14476) eq. 8."""

    kind: Literal["token_mean"] = "token_mean"


class PerRolloutMean(Strict):
    """All rollouts have the same weight, whatever their length and number of rows."""

    kind: Literal["per_rollout_mean"] = "per_rollout_mean"


class SequenceMeanTokenMean(Strict):
    """All rows have the same weight, and so do the tokens within a row. Source: GRPO (arXiv:2402.03300) eq. 3."""

    kind: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"


class SequenceMeanTokenSumNorm(Strict):
    """Sums over the tokens of a row, divided by a constant and by the number of rows.

    Attributes:
        length: The constant, in tokens; null for the run's `max_tokens`.

    Source: Dr. GRPO (arXiv:2503.20783), its listing 1.
    """

    kind: Literal["sequence_mean_token_sum_norm"] = "sequence_mean_token_sum_norm"
    length: int | None = Field(default=None, ge=1)


class PromptMean(Strict):
    """All prompts have the same weight, and so do the tokens of a group. Source: ScaleRL (arXiv:2510.13786)."""

    kind: Literal["prompt_mean"] = "prompt_mean"


Aggregation = Annotated[
    TokenMean | PerRolloutMean | SequenceMeanTokenMean | SequenceMeanTokenSumNorm | PromptMean,
    Field(discriminator="kind"),
]


class Proximal(StrEnum):
    """Source of the log-probabilities of the proximal policy.

    `RECOMPUTED`: the trained weights at the start of the batch; costs a forward pass if the batch has several optimiser
    steps. `SAMPLER`: those of the sampler, so that the ratio is pi / mu.
    """

    RECOMPUTED = "recomputed"
    SAMPLER = "sampler"


class Objective(Strict):
    """The objective of a policy-gradient step.

    Attributes:
        loss: Loss per token.
        correction: Off-policy correction for rows that the proximal policy did not sample.
        kl: Penalty against the reference policy.
        aggregation: Weights of the tokens in the sum.
        proximal: Source of the proximal policy's log-probabilities.
        entropy_coefficient: Weight of the entropy that is subtracted from the loss of each token.
    """

    loss: Loss = ClipLoss()
    correction: Correction = TokenCorrection()
    kl: Kl = NoKl()
    aggregation: Aggregation = TokenMean()
    proximal: Proximal = Proximal.RECOMPUTED
    entropy_coefficient: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _fit_together(self) -> "Objective":
        if problem := conflict(self.loss, self.correction, self.proximal):
            raise ValueError(problem)
        return self


def conflict(loss: Loss, correction: Correction, proximal: Proximal) -> str:
    """Describes settings that have no effect, or the same effect twice; empty if they are consistent."""
    if isinstance(correction, DecoupledCorrection) and not isinstance(loss, ClipLoss):
        return f"correction: decoupled is for the loss clip, not {loss.kind}"
    if isinstance(correction, NoCorrection):
        return ""
    if isinstance(loss, ImportanceLoss):
        return 'correction: must be none: the loss importance corrects by itself (set { kind = "none" })'
    if proximal is Proximal.SAMPLER:
        return 'correction: must be none: the ratio is against the sampler already (set { kind = "none" })'
    return ""
