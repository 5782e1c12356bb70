"""Engine against trainer: which rows count, and the metrics against numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.algorithms.policy_gradient import means
from fulmen_algorithm.policy.engine_settings import MismatchSettings
from fulmen_algorithm.training.engine_mismatch import ROWS, engine_mismatch, is_fresh
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_batch

LOGPROBS = st.floats(min_value=-20, max_value=0)


def row(engine, *, version=3):
    return row_from_completion(
        rollout_id="r",
        prompt_ids=[1],
        completion_ids=range(len(engine)),
        logprobs=engine,
        advantage=1.0,
        version=version,
    )


def test_only_rows_of_the_present_version_are_fresh():
    whole = row([-1.0, -2.0])
    assert is_fresh(whole, current_version=3)
    assert not is_fresh(whole, current_version=4)
    assert not is_fresh(replace(whole, policy_versions=(-1, 2, 3)), current_version=3)


@given(st.lists(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_metrics_are_those_of_the_formulas(rows):
    found = engine_mismatch([row([e for e, _ in pairs]) for pairs in rows], [[0.0, *(t for _, t in p)] for p in rows])
    engine, trainer = np.array([pair for pairs in rows for pair in pairs], dtype=np.float64).T
    delta = trainer - engine
    assert found["engine_mismatch_kl"] == pytest.approx(np.mean(np.exp(delta) - delta - 1), rel=1e-9, abs=1e-12)
    assert found["engine_mismatch_logprob_mean"] == pytest.approx(np.abs(delta).mean())
    assert found["engine_mismatch_logprob_max"] == np.abs(delta).max()
    assert found["engine_mismatch_tokens"] == delta.size


def test_without_a_token_there_is_nothing_to_say():
    assert engine_mismatch([], []) == {}


def test_a_probability_of_nothing_does_not_overflow():
    assert engine_mismatch([row([-2000.0])], [[0.0, 0.0]])["engine_mismatch_kl"] > 1e30


def sampled_rows(policy, *, count=24, tokens=12, temperature=1.0):
    """Samples answers of a policy, with the log-probabilities that an engine would report."""
    torch.manual_seed(1)
    ids = torch.randint(6, 25, (count, 1))
    logprobs = []
    for _ in range(tokens):
        with torch.no_grad():
            scores = torch.log_softmax(policy.model(ids).logits[:, -1] / temperature, dim=-1)
        chosen = torch.multinomial(scores.exp(), 1)
        logprobs.append(scores.gather(1, chosen))
        ids = torch.cat([ids, chosen], dim=1)
    return [
        row_from_completion(
            rollout_id=f"rollout-{index}",
            prompt_ids=line[:1],
            completion_ids=line[1:],
            logprobs=said,
            advantage=float(index % 2),
            version=3,
        )
        for index, (line, said) in enumerate(zip(ids.tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True))
    ]


def checked(policy, rows, *, temperature=1.0, minibatches=1):
    """Trains on rows like a run, and returns the metrics."""
    state = make_state(policy, OptimizerSettings(learning_rate=1e-2))
    results = train_batch(
        state,
        rows,
        settings=StepSettings(temperature=temperature),
        batch=BatchSettings(minibatches=minibatches, measure_mismatch=True),
        seed=0,
        current_version=3,
    )
    return means(results)


@pytest.fixture
def sharp(policy):
    """A policy with sharp preferences, like a trained one."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return policy


@pytest.mark.parametrize("minibatches", [1, 3])
def test_an_honest_engine_agrees_with_the_trainer_for_any_minibatches(sharp, minibatches):
    metrics = checked(sharp, sampled_rows(sharp), minibatches=minibatches)
    assert metrics["engine_mismatch_kl"] < 1e-9
    assert metrics["engine_mismatch_logprob_max"] < 1e-4
    assert metrics["engine_mismatch_tokens"] == 12 * (24 if minibatches > 1 else ROWS)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_an_engine_that_leaves_the_temperature_out_is_caught(sharp, minibatches):
    metrics = checked(sharp, sampled_rows(sharp, temperature=1.0), temperature=0.7, minibatches=minibatches)
    assert metrics["engine_mismatch_kl"] > MismatchSettings().warn


def test_an_engine_with_another_model_is_caught(sharp, model_dir):
    metrics = checked(PolicyModel.load(model_dir), sampled_rows(sharp))
    assert metrics["engine_mismatch_kl"] > MismatchSettings().warn


def test_rows_of_older_versions_are_no_evidence(sharp):
    rows = [replace(row, policy_versions=(-1, *[2] * 12)) for row in sampled_rows(sharp, temperature=0.5)]
    assert "engine_mismatch_kl" not in checked(sharp, rows)
