import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fulmen_algorithm.training.losses import Aggregation, KlEstimator, LossSettings
from fulmen_algorithm.training.packing import PackingMode
from fulmen_algorithm.training.policy import OptimizerSettings, PolicyModel, Schedule
from fulmen_algorithm.training.rows import NO_VERSION, Row
from fulmen_algorithm.training.step import (
    BatchSettings,
    StepSettings,
    logprobs_of,
    make_state,
    sft_step,
    train_batch,
    train_step,
)

OPTIMIZER = OptimizerSettings(learning_rate=1e-3)


def weights_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("mode", list(PackingMode))
def test_micro_batches_change_neither_loss_nor_gradient_norm(model_dir, rows, aggregation, mode):
    results = []
    for budget in (10_000, 24):
        state = make_state(PolicyModel.load(model_dir), OPTIMIZER)
        loss = LossSettings(aggregation=aggregation)
        settings = StepSettings(token_budget=budget, packing=mode, loss=loss)
        results.append(train_step(state, rows, settings=settings, current_version=2))
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)
    assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-4, abs=1e-6)


def test_the_temperature_applies_to_the_logprobs(policy, rows):
    settings = StepSettings(temperature=0.7)
    row = rows[0]
    ids = torch.tensor([row.token_ids])
    with torch.no_grad():
        logits = policy.model(ids).logits[0].double().numpy() / 0.7
    expected = [
        logits[t - 1, row.token_ids[t]] - np.log(np.exp(logits[t - 1]).sum()) for t in range(1, len(row.token_ids))
    ]
    assert logprobs_of(policy, [row], settings=settings)[0][1:] == pytest.approx(expected, abs=1e-5)


def test_a_positive_advantage_makes_its_tokens_likelier_and_a_negative_one_unlikelier(policy, rows):
    state = make_state(policy, OPTIMIZER)
    signed = [replace(row, advantage=1.0 if i % 2 else -1.0) for i, row in enumerate(rows)]
    settings = StepSettings(loss=LossSettings(importance_cap=None))
    before = logprobs_of(policy, signed, settings=settings)
    for _ in range(3):
        train_step(state, signed, settings=settings)
    after = logprobs_of(policy, signed, settings=settings)
    gain = 0.0
    for row, old, new in zip(signed, before, after, strict=True):
        gain += row.advantage * sum(n - o for n, o, m in zip(new, old, row.loss_mask, strict=True) if m)
    assert gain > 0


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(policy, rows):
    state = make_state(policy, OPTIMIZER)
    train_step(state, rows, settings=StepSettings())
    before, moments = weights_of(policy), state.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    # exp(proximal - sampler) overflows to infinity, and an infinite cap does not hold it.
    spoiled = [replace(row, old_logprobs=tuple(-1e6 if m else 0.0 for m in row.loss_mask)) for row in rows]
    result = train_step(state, spoiled, settings=StepSettings(loss=LossSettings(importance_cap=math.inf)))
    assert result.skipped
    assert not math.isfinite(result.loss)
    assert (state.optimizer_steps, state.skipped_steps) == (1, 1)
    assert same(before, weights_of(policy))
    assert torch.equal(moments, state.optimizer.state_dict()["state"][0]["exp_avg"])
    assert not train_step(state, rows, settings=StepSettings()).skipped


def test_rows_without_a_trained_token_are_a_skipped_step(policy):
    row = Row(
        rollout_id="a",
        token_ids=(1, 2),
        loss_mask=(False, False),
        old_logprobs=(0.0, 0.0),
        advantage=1.0,
        policy_versions=(NO_VERSION, NO_VERSION),
    )
    assert train_step(make_state(policy, OPTIMIZER), [row], settings=StepSettings()).skipped


def test_proximal_logprobs_of_the_same_weights_give_ratio_one(policy, rows):
    state = make_state(policy, OPTIMIZER)
    proximal = logprobs_of(policy, rows, settings=StepSettings())
    result = train_step(state, rows, settings=StepSettings(), proximal_logprobs=proximal)
    assert result.metrics["clipped_share"] == 0.0


def test_a_reference_of_the_same_weights_has_no_divergence(model_dir, policy, rows):
    settings = StepSettings(loss=LossSettings(kl=KlEstimator.K3, kl_coefficient=0.1))
    state = make_state(policy, OPTIMIZER)
    reference = PolicyModel.load(model_dir)
    first = train_step(state, rows, settings=settings, reference=reference)
    second = train_step(state, rows, settings=settings, reference=reference)
    assert first.metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert second.metrics["kl_reference"] > 0


def test_a_batch_visits_each_rollout_once_per_epoch_and_keeps_its_rows_together(policy, rows):
    state = make_state(policy, OPTIMIZER)
    batch = BatchSettings(minibatches=3, epochs=2)
    results = train_batch(state, rows, settings=StepSettings(), batch=batch, seed=1)
    assert len(results) == 6
    assert state.optimizer_steps == 6
    trained = sum(row.trained_tokens for row in rows)
    assert sum(r.metrics["tokens"] for r in results[:3]) == trained
    assert sum(r.metrics["tokens"] for r in results[3:]) == trained


def test_a_batch_can_be_cancelled_between_steps(policy, rows):
    state = make_state(policy, OPTIMIZER)
    answers = iter([True, False])
    batch = BatchSettings(minibatches=3)
    results = train_batch(state, rows, settings=StepSettings(), batch=batch, seed=1, keep_going=lambda: next(answers))
    assert len(results) == 1


def test_supervised_steps_learn_a_sentence(policy, rows):
    state = make_state(policy, OptimizerSettings(learning_rate=3e-3))
    losses = [sft_step(state, rows[:2], settings=StepSettings()).loss for _ in range(40)]
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.CONSTANT, [0.0, 0.5, 1.0, 1.0, 1.0]),
        (Schedule.LINEAR, [0.0, 0.5, 1.0, 0.5, 0.0]),
        (Schedule.COSINE, [0.0, 0.5, 1.0, 0.5, 0.0]),
    ],
)
def test_schedules_warm_up_and_decay(policy, rows, schedule, expected):
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule, warmup_steps=2, total_steps=4)
    state = make_state(policy, settings)
    rates = [sft_step(state, rows[:1], settings=StepSettings()).learning_rate for _ in range(5)]
    assert rates == pytest.approx(expected)


def test_a_schedule_that_decays_needs_an_end(policy):
    with pytest.raises(ValueError, match="total_steps"):
        make_state(policy, OptimizerSettings(learning_rate=1.0, schedule=Schedule.LINEAR))
