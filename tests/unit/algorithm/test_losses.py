import numpy as np
import pytest
import torch

from fulmen_algorithm.training.losses import (
    Aggregation,
    KlEstimator,
    LossSettings,
    cross_entropy_loss,
    loss_metrics,
    policy_loss,
    token_sums,
    token_weights,
)

SHAPE = (6, 17)


def tensors(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    trained = -chance.exponential(1.0, SHAPE)
    mask = chance.random(SHAPE) < 0.5
    return {
        "trained": trained,
        "proximal": trained + chance.normal(0, 0.3, SHAPE),
        "sampler": trained + chance.normal(0, 0.6, SHAPE),
        "reference": trained + chance.normal(0, 0.5, SHAPE),
        "advantages": np.repeat(chance.normal(0, 1, (SHAPE[0], 1)), SHAPE[1], 1),
        "weights": mask / mask.sum(),
        "versions": chance.integers(0, 4, SHAPE),
    }


def written_out(x: dict[str, np.ndarray], settings: LossSettings) -> float:
    """The loss token by token, in float64, as it is written in the papers."""
    total = 0.0
    for at in np.ndindex(SHAPE):
        if x["weights"][at] == 0:
            continue
        ratio = np.exp(x["trained"][at] - x["proximal"][at])
        clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        term = -min(ratio * x["advantages"][at], clipped * x["advantages"][at])
        if settings.importance_cap is not None:
            term *= min(np.exp(x["proximal"][at] - x["sampler"][at]), settings.importance_cap)
        d = x["reference"][at] - x["trained"][at]
        penalty = {"none": 0.0, "k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[settings.kl.value]
        total += x["weights"][at] * (term + settings.kl_coefficient * penalty)
    return total


def computed(x: dict[str, np.ndarray], settings: LossSettings, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    t = {k: torch.tensor(v, dtype=dtype) for k, v in x.items()}
    return policy_loss(
        logprobs_BT=t["trained"].requires_grad_(),
        proximal_BT=t["proximal"],
        sampler_BT=t["sampler"],
        advantages_BT=t["advantages"],
        weights_BT=t["weights"],
        reference_BT=t["reference"],
        settings=settings,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [None, 2.0, 0.7])
@pytest.mark.parametrize("kl", list(KlEstimator))
def test_policy_loss_equals_the_formula_written_out_in_float64(seed, cap, kl):
    settings = LossSettings(importance_cap=cap, kl=kl, kl_coefficient=0.3)
    x = tensors(seed)
    assert computed(x, settings).item() == pytest.approx(written_out(x, settings), rel=1e-12)
    assert computed(x, settings, torch.float32).item() == pytest.approx(written_out(x, settings), rel=1e-4, abs=1e-6)


def test_gradient_equals_finite_differences_of_the_written_formula():
    settings = LossSettings(kl=KlEstimator.K3, kl_coefficient=0.1)
    x = tensors(7)
    trained = torch.tensor(x["trained"], requires_grad=True)
    rest = {k: torch.tensor(v) for k, v in x.items()}
    policy_loss(
        logprobs_BT=trained,
        proximal_BT=rest["proximal"],
        sampler_BT=rest["sampler"],
        advantages_BT=rest["advantages"],
        weights_BT=rest["weights"],
        reference_BT=rest["reference"],
        settings=settings,
    ).backward()
    step = 1e-6
    for at in [(0, 0), (1, 3), (2, 5), (3, 11), (5, 16)]:
        up, down = ({**x, "trained": x["trained"].copy()} for _ in range(2))
        up["trained"][at] += step
        down["trained"][at] -= step
        slope = (written_out(up, settings) - written_out(down, settings)) / (2 * step)
        assert trained.grad[at].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_extreme_values_outside_the_mask_leave_no_trace():
    x = tensors(1)
    spoiled = {k: v.copy() for k, v in x.items()}
    outside = x["weights"] == 0
    spoiled["trained"][outside], spoiled["proximal"][outside] = 0.0, -1e30
    loss = computed(spoiled, LossSettings())
    assert loss.item() == pytest.approx(computed(x, LossSettings()).item(), rel=1e-12)


def test_a_kl_penalty_without_a_reference_is_refused():
    x = {k: torch.tensor(v) for k, v in tensors(0).items()}
    with pytest.raises(ValueError, match="reference"):
        policy_loss(
            logprobs_BT=x["trained"],
            proximal_BT=x["proximal"],
            sampler_BT=x["sampler"],
            advantages_BT=x["advantages"],
            weights_BT=x["weights"],
            settings=LossSettings(kl=KlEstimator.K1, kl_coefficient=1.0),
        )


def test_metrics_equal_their_definitions_and_add_up_over_micro_batches():
    settings = LossSettings()
    x = tensors(3)
    t = {k: torch.tensor(v) for k, v in x.items()}

    def sums(part: slice):
        return token_sums(
            logprobs_BT=t["trained"][part],
            proximal_BT=t["proximal"][part],
            sampler_BT=t["sampler"][part],
            advantages_BT=t["advantages"][part],
            mask_BT=t["weights"][part] > 0,
            versions_BT=t["versions"][part],
            current_version=3,
            settings=settings,
        )

    metrics = loss_metrics([sums(slice(0, 2)), sums(slice(2, 6))], positions=100)
    mask = x["weights"] > 0
    trained, proximal, sampler = x["trained"][mask], x["proximal"][mask], x["sampler"][mask]
    advantages, ratio = x["advantages"][mask], np.exp(trained - proximal)
    weights = np.exp(proximal - sampler)
    clipped = ((ratio > 1.28) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    expected = {
        "tokens": mask.sum(),
        "masked_share": 1 - mask.sum() / 100,
        "clipped_share": clipped.mean(),
        "capped_share": (weights > 2).mean(),
        "abs_logprob_delta": np.abs(proximal - sampler).mean(),
        "kl_sampler_trainer": (weights - np.log(weights) - 1).mean(),
        "importance_mean": weights.mean(),
        "effective_sample_share": weights.sum() ** 2 / (weights**2).sum() / mask.sum(),
        "kl_reference": 0.0,
        "entropy_estimate": -trained.mean(),
        "staleness_mean": (3 - x["versions"][mask]).mean(),
        "staleness_max": (3 - x["versions"][mask]).max(),
    }
    assert metrics == {k: pytest.approx(float(v), rel=1e-9, abs=1e-12) for k, v in expected.items()}


def test_token_weights_sum_to_one_and_know_their_unit(rows):
    for aggregation in Aggregation:
        weights = token_weights(rows, aggregation)
        assert sum(w * r.trained_tokens for w, r in zip(weights, rows, strict=True)) == pytest.approx(1)
    per_rollout: dict[str, float] = {}
    for weight, row in zip(token_weights(rows, Aggregation.PER_ROLLOUT_MEAN), rows, strict=True):
        per_rollout[row.rollout_id] = per_rollout.get(row.rollout_id, 0) + weight * row.trained_tokens
    assert list(per_rollout.values()) == [pytest.approx(1 / 8)] * 8
    assert len(set(token_weights(rows, Aggregation.TOKEN_MEAN))) == 1


def test_cross_entropy_is_the_weighted_negative_log_likelihood():
    x = tensors(4)
    loss = cross_entropy_loss(logprobs_BT=torch.tensor(x["trained"]), weights_BT=torch.tensor(x["weights"]))
    assert loss.item() == pytest.approx(-(x["trained"] * x["weights"]).sum())
