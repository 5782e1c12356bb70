import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import cross_entropy_loss, loss_metrics, policy_loss, token_sums, token_weights
from fulmen_algorithm.losses.objectives import (
    CispoLoss,
    ClipLoss,
    DecoupledCorrection,
    DppoLoss,
    GeometricCorrection,
    GspoLoss,
    IcepopCorrection,
    ImportanceLoss,
    KlEstimator,
    LossKl,
    NoCorrection,
    NoKl,
    Objective,
    PerRolloutMean,
    PromptMean,
    Proximal,
    ReinforceLoss,
    SapoLoss,
    SequenceCorrection,
    SequenceMaskCorrection,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    TokenCorrection,
    TokenMean,
)
from fulmen_algorithm.training.settings import PackingMode
from tests.support.algorithm.objective_world import computed, row_of, samples
from tests.support.algorithm.reference_losses import Sample, gradient, has_bend, objective_value

LOSSES = [
    ClipLoss(),
    ClipLoss(dual_clip=1.4),
    GspoLoss(low=0.1, high=0.15),
    GspoLoss(low=0.1, high=0.15, form="token"),
    CispoLoss(ratio_min=0.8, ratio_max=1.2),
    CispoLoss(),
    SapoLoss(),
    ReinforceLoss(),
    ImportanceLoss(),
    DppoLoss(low=0.05, high=0.05),
]
CORRECTIONS = [
    NoCorrection(),
    TokenCorrection(),
    TokenCorrection(cap=0.7),
    SequenceCorrection(),
    SequenceMaskCorrection(),
    GeometricCorrection(low=0.8, high=1.3),
    IcepopCorrection(low=0.7, high=1.5),
    DecoupledCorrection(),
    DecoupledCorrection(cap=None),
]
KLS = [
    NoKl(),
    *(LossKl(estimator=estimator, coefficient=0.3) for estimator in KlEstimator),
    *(LossKl(estimator=estimator, coefficient=0.3, weighted=True) for estimator in KlEstimator),
]
AGGREGATIONS = [
    TokenMean(),
    PerRolloutMean(),
    SequenceMeanTokenMean(),
    SequenceMeanTokenSumNorm(length=7),
    PromptMean(),
]
SEEDS = st.integers(0, 2**32 - 1)


def fitting(loss, correction, **rest) -> Objective:
    """An objective with this correction, or none where the two do not go together."""
    try:
        return Objective(loss=loss, correction=correction, **rest)
    except ValidationError:
        return Objective(loss=loss, correction=NoCorrection(), **rest)


def same(objective: Objective, made: list[Sample], *, mode: PackingMode, budget: int) -> None:
    assume(not has_bend(made, objective))
    value, slopes = computed(made, objective, mode=mode, budget=budget)
    assert value == pytest.approx(objective_value(made, objective), rel=1e-9, abs=1e-12)
    for slope, expected in zip(slopes, gradient(made, objective), strict=True):
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-8)
    single, _ = computed(made, objective, mode=mode, budget=budget, dtype=torch.float32)
    assert single == pytest.approx(value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@settings(max_examples=6)
@given(seed=SEEDS, correction=st.sampled_from(CORRECTIONS), mode=st.sampled_from(list(PackingMode)))
def test_every_loss_and_its_gradient_are_those_of_its_paper(loss, seed, correction, mode):
    same(fitting(loss, correction), samples(seed), mode=mode, budget=16)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
@settings(max_examples=5)
@given(seed=SEEDS, mode=st.sampled_from(list(PackingMode)))
def test_every_correction_and_its_gradient_are_those_of_its_paper(correction, seed, mode):
    same(Objective(correction=correction), samples(seed), mode=mode, budget=16)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
@settings(max_examples=5)
@given(seed=SEEDS, kl=st.sampled_from(KLS), loss=st.sampled_from(LOSSES))
def test_every_aggregation_and_kl_form_and_their_gradients_are_those_of_their_papers(aggregation, seed, kl, loss):
    objective = fitting(loss, TokenCorrection(), kl=kl, aggregation=aggregation)
    same(objective, samples(seed), mode=PackingMode.PACKED, budget=16)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_extreme_ratios_give_neither_nan_nor_infinity(loss, correction):
    extremes = np.array([-1e4, -90.0, -1e-9, -90.0, -1e4])
    far = Sample(
        rollout="a",
        group="a",
        pi=extremes,
        proximal=extremes[::-1].copy() * 2,
        mu=np.array([-1e-9, -1e4, -1e4, -1e-9, -5.0]),
        reference=np.array([-1e4, -1e-9, -1e4, -5.0, -1e-9]),
        advantages=np.array([1.0, -1.0, -1.0, 1.0, 0.0]),
    )
    against = replace(far, pi=far.proximal, proximal=far.pi, advantages=-far.advantages)
    objective = fitting(loss, correction, kl=LossKl())
    value, slopes = computed([far, against], objective, dtype=torch.float32)
    assert math.isfinite(value)
    assert np.isfinite(np.concatenate(slopes)).all()


def one_token(*, ratio: float, advantage: float, weight: float = 1.0) -> Sample:
    proximal = np.array([math.log(0.05)])
    return Sample(
        rollout="a",
        group="a",
        pi=proximal + math.log(ratio),
        proximal=proximal,
        mu=proximal - math.log(weight),
        reference=proximal,
        advantages=np.array([advantage]),
    )


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "value", "slope"),
    [
        # The slope by log pi is -r A where the clip leaves the token alone, and 0 where it does not.
        (ClipLoss(), 1.2, 2.0, -2.4, -2.4),
        (ClipLoss(), 1.3, 2.0, -2.56, 0.0),
        (ClipLoss(), 0.7, 2.0, -1.4, -1.4),
        (ClipLoss(), 0.7, -2.0, 1.6, 0.0),
        (ClipLoss(), 0.9, -2.0, 1.8, 1.8),
        (ClipLoss(), 4.0, -2.0, 8.0, 8.0),
        (ClipLoss(dual_clip=3.0), 4.0, -2.0, 6.0, 0.0),
        (ClipLoss(dual_clip=3.0), 2.5, -2.0, 5.0, 5.0),
        (ClipLoss(dual_clip=3.0), 4.0, 2.0, -2.56, 0.0),
        (GspoLoss(), 1.0003, 1.0, -1.0003, -1.0003),
        (GspoLoss(), 1.0005, 1.0, -1.0004, 0.0),
        (GspoLoss(), 0.9996, -1.0, 0.9997, 0.0),
        # CISPO keeps a gradient beyond its bound: the bound itself.
        (CispoLoss(ratio_max=2.0), 3.0, 1.0, -2.0 * math.log(0.15), -2.0),
        (CispoLoss(ratio_min=0.5), 0.1, -1.0, 0.5 * math.log(0.005), 0.5),
        # The soft gate at r = 1 is worth 2 / tau, with the plain gradient.
        (SapoLoss(), 1.0, 1.0, -2.0, -1.0),
        (SapoLoss(), 1.0, -1.0, 2.0 / 1.05, 1.0),
        (ReinforceLoss(), 3.0, 2.0, -2.0 * math.log(0.15), -2.0),
        (DppoLoss(), 4.0, 1.0, -4.0, -4.0),
        (DppoLoss(low=0.01), 0.7, -1.0, 0.0, 0.0),
        (DppoLoss(low=0.01), 4.0, -1.0, 4.0, 4.0),
    ],
)
def test_hand_made_cases_on_both_sides_of_every_bound(loss, ratio, advantage, value, slope):
    objective = Objective(loss=loss, correction=NoCorrection())
    got, slopes = computed([one_token(ratio=ratio, advantage=advantage)], objective)
    assert got == pytest.approx(value, rel=1e-9)
    assert slopes[0][0] == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("correction", "weight", "factor"),
    [
        (NoCorrection(), 9.0, 1.0),
        (TokenCorrection(), 1.9, 1.9),
        (TokenCorrection(), 9.0, 2.0),
        (TokenCorrection(), 0.1, 0.1),
        (SequenceMaskCorrection(), 2.9, 2.9),
        (SequenceMaskCorrection(), 3.1, 0.0),
        (GeometricCorrection(), 1.009, 1.0),
        (GeometricCorrection(), 1.011, 0.0),
        (GeometricCorrection(), 0.989, 0.0),
        (IcepopCorrection(), 4.9, 4.9),
        (IcepopCorrection(), 5.1, 0.0),
        (IcepopCorrection(), 0.49, 0.0),
        (DecoupledCorrection(), 4.9, 4.9),
        (DecoupledCorrection(), 5.1, 0.0),
        (DecoupledCorrection(cap=None), 50.0, 50.0),
    ],
)
def test_a_correction_multiplies_the_clipped_term(correction, weight, factor):
    token = one_token(ratio=1.1, advantage=1.0, weight=weight)
    value, slopes = computed([token], Objective(correction=correction))
    assert value == pytest.approx(-1.1 * factor)
    assert slopes[0][0] == pytest.approx(-1.1 * factor)


def test_the_importance_loss_needs_no_proximal_policy():
    value, _ = computed(
        [one_token(ratio=3.0, advantage=1.0, weight=2.0)],
        Objective(loss=ImportanceLoss(), correction=NoCorrection()),
    )
    assert value == pytest.approx(-6.0)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"loss": ImportanceLoss()}, "importance corrects by itself"),
        ({"proximal": Proximal.SAMPLER}, "against the sampler already"),
        ({"loss": GspoLoss(), "correction": DecoupledCorrection()}, "for the loss clip, not gspo"),
        ({"loss": {"kind": "clip", "dual_clip": 1.2}}, "greater than 1 \\+ high"),
        ({"loss": {"kind": "clip", "cap": 1.2}}, "Extra inputs"),
        ({"loss": {"kind": "clip", "low": "0.2"}}, "valid number"),
        ({"loss": {"kind": "clap"}}, "does not match any of the expected tags"),
        ({"correction": {"kind": "token", "cap": math.inf}}, "finite"),
    ],
)
def test_settings_that_would_do_nothing_or_do_not_exist_are_errors(choices, reason):
    with pytest.raises(ValidationError, match=reason):
        Objective(**choices)


def test_a_kl_penalty_without_a_reference_is_refused():
    nothing = torch.zeros(1, 1)
    batch = TokenBatch(
        logprobs_BT=nothing,
        proximal_BT=nothing,
        sampler_BT=nothing,
        advantages_BT=nothing,
        mask_BT=torch.ones(1, 1, dtype=torch.bool),
        row_index_BT=torch.zeros(1, 1, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match="reference"):
        policy_loss(batch, weights_BT=nothing, objective=Objective(kl=LossKl()))


@pytest.mark.parametrize("proximal", list(Proximal))
def test_metrics_equal_their_definitions_and_add_up_over_micro_batches(proximal):
    chance = np.random.default_rng(3)
    shape = (6, 17)
    mask = chance.random(shape) < 0.5
    x = {
        name: -chance.exponential(1.0, shape) for name in ("logprobs_BT", "proximal_BT", "sampler_BT", "reference_BT")
    } | {"advantages_BT": chance.normal(0, 1, shape), "mask_BT": mask, "row_index_BT": np.indices(shape)[0]}
    versions = chance.integers(0, 4, shape)
    correction = IcepopCorrection() if proximal is Proximal.RECOMPUTED else NoCorrection()
    objective = Objective(correction=correction, proximal=proximal, kl=LossKl(estimator=KlEstimator.K1))

    def sums(part: slice):
        batch = TokenBatch(**{name: torch.tensor(value[part]) for name, value in x.items()})
        return token_sums(batch, versions_BT=torch.tensor(versions[part]), current_version=3, objective=objective)

    metrics = loss_metrics([sums(slice(0, 2)), sums(slice(2, 6))], positions=100)
    trained, proximals, sampler = (x[name][mask] for name in ("logprobs_BT", "proximal_BT", "sampler_BT"))
    advantages, ratio = x["advantages_BT"][mask], np.exp(trained - proximals)
    delta = (trained if proximal is Proximal.SAMPLER else proximals) - sampler
    weights, count = np.exp(delta), mask.sum()
    dropped = ((weights > 5) | (weights < 0.5)).mean() if proximal is Proximal.RECOMPUTED else 0.0
    expected = {
        "tokens": count,
        "masked_share": 1 - count / 100,
        "clipped_share": (((ratio > 1.28) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))).mean(),
        "capped_share": 0.0,
        "correction_masked_share": dropped,
        "abs_logprob_delta": np.abs(delta).mean(),
        "abs_logprob_delta_max": np.abs(delta).max(),
        "kl_sampler_trainer_k1": (-delta).mean(),
        "kl_sampler_trainer": (weights - np.log(weights) - 1).mean(),
        "importance_mean": weights.mean(),
        "importance_max": weights.max(),
        "chi_squared": (weights**2).mean() - 1,
        "effective_sample_share": weights.sum() ** 2 / (weights**2).sum() / count,
        "kl_reference": (trained - x["reference_BT"][mask]).mean(),
        "entropy_estimate": -trained.mean(),
        "staleness_mean": (3 - versions[mask]).mean(),
        "staleness_max": (3 - versions[mask]).max(),
    }
    assert metrics == {k: pytest.approx(float(v), rel=1e-9, abs=1e-12) for k, v in expected.items()}


def test_a_truncated_weight_is_counted_as_such():
    tokens = [one_token(ratio=1.0, advantage=1.0, weight=w) for w in (1.0, 2.5, 3.0)]
    index = torch.tensor([[0], [1], [2]])

    def column(name: str) -> torch.Tensor:
        return torch.tensor(np.array([getattr(token, name) for token in tokens]))

    batch = TokenBatch(
        logprobs_BT=column("pi"),
        proximal_BT=column("proximal"),
        sampler_BT=column("mu"),
        advantages_BT=column("advantages"),
        mask_BT=index >= 0,
        row_index_BT=index,
    )
    sums = token_sums(batch, versions_BT=index, current_version=0, objective=Objective())
    assert (sums.tokens, sums.capped, sums.dropped) == (3, 2, 0)


@settings(max_examples=10)
@given(seed=SEEDS)
def test_token_weights_sum_to_one_and_share_it_among_their_units_alike(seed):
    rows = [row_of(sample) for sample in samples(seed, rows=9)]
    units = {
        "per_rollout_mean": lambda index: rows[index].rollout_id,
        "prompt_mean": lambda index: rows[index].group,
        "sequence_mean_token_mean": lambda index: index,
    }
    for aggregation in AGGREGATIONS:
        weights = token_weights(rows, aggregation)
        shares = [w * row.trained_tokens for w, row in zip(weights, rows, strict=True)]
        if aggregation.kind == "sequence_mean_token_sum_norm":
            full = [row.trained_tokens for row in rows if row.trained_tokens]
            assert sum(shares) == pytest.approx(np.mean(full) / aggregation.length)
            continue
        assert sum(shares) == pytest.approx(1)
        if unit := units.get(aggregation.kind):
            by_unit: dict[object, float] = {}
            for index, share in enumerate(shares):
                by_unit[unit(index)] = by_unit.get(unit(index), 0) + share
            full = [share for share in by_unit.values() if share]
            assert full == [pytest.approx(full[0])] * len(full)


def test_cutting_a_rollout_into_rows_does_not_change_its_weight(rows):
    weights = token_weights(rows, PerRolloutMean())
    per_rollout: dict[str, float] = {}
    for weight, row in zip(weights, rows, strict=True):
        per_rollout[row.rollout_id] = per_rollout.get(row.rollout_id, 0) + weight * row.trained_tokens
    assert list(per_rollout.values()) == [pytest.approx(1 / 8)] * 8


def test_cross_entropy_is_the_weighted_negative_log_likelihood():
    chance = np.random.default_rng(4)
    logprobs, weights = -chance.exponential(1.0, (3, 5)), chance.random((3, 5))
    loss = cross_entropy_loss(logprobs_BT=torch.tensor(logprobs), weights_BT=torch.tensor(weights))
    assert loss.item() == pytest.approx(-(logprobs * weights).sum())
