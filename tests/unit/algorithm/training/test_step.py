import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fulmen_algorithm.losses.objectives import (
    GspoLoss,
    LossKl,
    NoCorrection,
    Objective,
    PerRolloutMean,
    SequenceCorrection,
    TokenMean,
)
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import NO_VERSION, Row, spread_advantage
from fulmen_algorithm.training.settings import (
    BatchSettings,
    OptimizerSettings,
    PackingMode,
    Schedule,
    StepSettings,
)
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import sft_step, train_batch, train_step

OPTIMIZER = OptimizerSettings(learning_rate=1e-3)


def weights_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("aggregation", [TokenMean(), PerRolloutMean()])
@pytest.mark.parametrize("mode", list(PackingMode))
def test_micro_batches_change_neither_loss_nor_gradient_norm(model_dir, rows, aggregation, mode):
    results = []
    for budget in (10_000, 24):
        state = make_state(PolicyModel.load(model_dir), OPTIMIZER)
        objective = Objective(loss=GspoLoss(), correction=SequenceCorrection(), aggregation=aggregation)
        settings = StepSettings(token_budget=budget, packing=mode, objective=objective)
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


def test_of_tokens_that_do_not_train_no_logits_are_computed_where_none_are_asked_for(policy, rows):
    every = logprobs_of(policy, rows, settings=StepSettings())
    asked = logprobs_of(policy, rows, settings=StepSettings(), trained_only=True)
    for row, whole, part in zip(rows, every, asked, strict=True):
        assert part == pytest.approx([p if m else 0.0 for p, m in zip(whole, row.loss_mask, strict=True)], abs=1e-6)


def test_a_positive_advantage_makes_its_tokens_likelier_and_a_negative_one_unlikelier(policy, rows):
    state = make_state(policy, OPTIMIZER)
    signed = [
        replace(row, advantages=spread_advantage(1.0 if i % 2 else -1.0, row.loss_mask)) for i, row in enumerate(rows)
    ]
    settings = StepSettings(objective=Objective(correction=NoCorrection()))
    before = logprobs_of(policy, signed, settings=settings)
    for _ in range(3):
        train_step(state, signed, settings=settings)
    after = logprobs_of(policy, signed, settings=settings)
    gain = 0.0
    for row, old, new in zip(signed, before, after, strict=True):
        gain += sum(a * (n - o) for n, o, a in zip(new, old, row.advantages, strict=True))
    assert gain > 0


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(policy, rows):
    state = make_state(policy, OPTIMIZER)
    train_step(state, rows, settings=StepSettings())
    before, moments = weights_of(policy), state.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    # Larger than any float32.
    spoiled = [replace(row, advantages=tuple(1e300 if m else 0.0 for m in row.loss_mask)) for row in rows]
    result = train_step(state, spoiled, settings=StepSettings())
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
        advantages=(0.0, 0.0),
        policy_versions=(NO_VERSION, NO_VERSION),
    )
    assert train_step(make_state(policy, OPTIMIZER), [row], settings=StepSettings()).skipped


def test_proximal_logprobs_of_the_same_weights_give_ratio_one(policy, rows):
    state = make_state(policy, OPTIMIZER)
    proximal = logprobs_of(policy, rows, settings=StepSettings())
    result = train_step(state, rows, settings=StepSettings(), proximal_logprobs=proximal)
    assert result.metrics["clipped_share"] == 0.0


def test_a_reference_of_the_same_weights_has_no_divergence(model_dir, policy, rows):
    settings = StepSettings(objective=Objective(kl=LossKl(coefficient=0.1)))
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


def test_supervised_steps_learn_a_sentence(policy, rows):
    state = make_state(policy, OptimizerSettings(learning_rate=3e-3))
    losses = [sft_step(state, rows[:2], settings=StepSettings()).loss for _ in range(40)]
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.CONSTANT, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (Schedule.LINEAR, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (Schedule.COSINE, [0.5, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_schedules_warm_up_and_decay(policy, rows, schedule, expected):
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule, warmup_steps=2, total_steps=4)
    state = make_state(policy, settings)
    rates = [sft_step(state, rows[:1], settings=StepSettings()).learning_rate for _ in range(5)]
    assert rates == pytest.approx(expected)


def test_a_schedule_follows_the_planned_steps_also_after_skipped_ones(policy, rows):
    settings = OptimizerSettings(learning_rate=1e-3, schedule=Schedule.LINEAR, total_steps=1)
    state = make_state(policy, settings)
    batch, step = BatchSettings(minibatches=100), StepSettings(planned_steps=100, total_steps=200)
    results = train_batch(state, rows, settings=step, batch=batch, seed=1)
    assert 1 < len(results) < 100
    assert [r.learning_rate for r in results] == pytest.approx([1e-3 * (100 - n) / 200 for n in range(len(results))])
    masked = [
        Row(
            rollout_id="m",
            token_ids=(1,),
            loss_mask=(False,),
            old_logprobs=(0.0,),
            advantages=(0.0,),
            policy_versions=(NO_VERSION,),
        )
    ]
    own = make_state(policy, replace(settings, total_steps=3))
    results = [sft_step(own, masked if number == 1 else rows, settings=StepSettings()) for number in range(4)]
    assert [r.skipped for r in results] == [False, True, False, False]
    assert [r.learning_rate for r in results] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3, 0.0])


def test_a_warm_up_waits_for_the_steps_that_were_taken(policy, rows):
    settings = OptimizerSettings(learning_rate=1.0, schedule=Schedule.LINEAR, warmup_steps=4, total_steps=12)
    rate = make_state(policy, settings).rate
    assert [rate.at(taken=n, planned=n) for n in (0, 2, 4, 8, 12)] == [0.25, 0.75, 1.0, 0.5, 0.0]
    assert rate.at(taken=2, planned=8) == 0.375


def test_a_schedule_that_decays_needs_an_end(policy):
    with pytest.raises(ValueError, match="total_steps"):
        make_state(policy, OptimizerSettings(learning_rate=1.0, schedule=Schedule.LINEAR))
