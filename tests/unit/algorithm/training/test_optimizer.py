from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.training.optimizer import MIN_NORMS, REMEMBERED, NormWatch
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.state_files import read_state, write_state
from fulmen_algorithm.training.step import train_step

SETTINGS = StepSettings(explosion_factor=5.0, max_grad_norm=1.0)


def test_a_gradient_far_above_the_median_is_an_explosion_once_enough_were_seen():
    watch = NormWatch()
    assert not any(watch.explodes(norm, 2.0) for norm in [1e6] + [1.0] * (MIN_NORMS - 2))
    assert watch.explodes(1.0, 2.0) is False
    assert watch.explodes(2.1, 2.0) is True
    assert watch.explodes(2.1, None) is False
    assert watch.explodes(float("nan"), 2.0) is False
    assert len(watch.norms) == MIN_NORMS + 2


@given(st.floats(1, 1e6), st.floats(10, 1e9))
def test_a_high_norm_that_lasts_stops_counting_as_an_explosion(low, ratio):
    watch = NormWatch([low] * REMEMBERED)
    skipped = [watch.explodes(low * ratio, 5.0) for _ in range(REMEMBERED)]
    assert skipped[0]
    assert sum(skipped) <= REMEMBERED // 2 + 1


def test_norms_of_nothing_make_no_explosion_of_what_comes_after_them():
    # Where rewards are rare, most batches have equal ones, and so neither advantages nor a gradient.
    watch = NormWatch()
    assert not any(watch.explodes(norm, 50.0) for norm in [0.0, 0.0, 0.0, 1.0] * REMEMBERED)
    assert watch.explodes(51.0, 50.0) is True


def test_an_exploding_step_changes_nothing_but_the_counts_and_is_remembered_by_a_checkpoint(model_dir, rows, tmp_path):
    state = make_state(PolicyModel.load(model_dir), OptimizerSettings(learning_rate=1e-3))
    usual = train_step(state, rows, settings=SETTINGS)
    assert not usual.exploded
    state.norms = NormWatch([usual.grad_norm / 10] * MIN_NORMS)
    before = {name: p.detach().clone() for name, p in state.policy.model.named_parameters()}
    result = train_step(state, rows, settings=SETTINGS)
    assert (result.exploded, result.skipped, state.skipped_steps, state.optimizer_steps) == (True, True, 1, 1)
    assert all(torch.equal(p, before[name]) for name, p in state.policy.model.named_parameters())
    assert not train_step(state, rows, settings=replace(SETTINGS, explosion_factor=None)).skipped
    (tmp_path / "checkpoint").mkdir()
    write_state(state, tmp_path / "checkpoint")
    again = make_state(PolicyModel.load(model_dir), OptimizerSettings(learning_rate=1e-3))
    read_state(tmp_path / "checkpoint", again)
    assert again.norms.norms == state.norms.norms
