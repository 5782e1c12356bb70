"""The losses by covariance, against the formulas of Cui et al. (arXiv:2505.22617) as the paper writes them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fulmen_algorithm.losses.covariance import chosen_tokens
from fulmen_algorithm.losses.entropy_settings import ClipCovLoss, KlCovLoss
from fulmen_algorithm.losses.loss_terms import TokenBatch, loss_terms
from fulmen_algorithm.losses.objectives import NoCorrection, Objective
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_batch, train_step
from tests.support.algorithm.objective_world import row_of, samples

CLIP = ClipCovLoss(share=0.2, covariance_low=0.1, covariance_high=2.0)
KL = KlCovLoss(share=0.2, coefficient=0.7)


def covariances(made) -> np.ndarray:
    """Eq. 10: (log pi(y_i) - mean of log pi) (A(y_i) - mean of A), over the N tokens of the batch."""
    logprobs, advantages = [np.concatenate([getattr(s, name) for s in made]) for name in ("proximal", "advantages")]
    return (logprobs - logprobs.sum() / len(logprobs)) * (advantages - advantages.sum() / len(advantages))


def chosen(made, loss, seed: int = 0) -> np.ndarray:
    """What is chosen of the trained tokens, in order."""
    rows = [row_of(sample) for sample in made]
    logprobs = []
    for row, sample in zip(rows, made, strict=True):
        values = iter(sample.proximal)
        logprobs.append([float(next(values)) if trains else 1e9 for trains in row.loss_mask])
    flags = chosen_tokens(rows, logprobs, loss, seed=seed)
    assert [len(each) for each in flags] == [len(row.token_ids) for row in rows]
    return np.array(
        [
            flag
            for row, each in zip(rows, flags, strict=True)
            for flag, trains in zip(each, row.loss_mask, strict=True)
            if trains
        ]
    )


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_chooses_the_highest_covariances(seed):
    made = samples(seed, rows=12)
    cov, found = covariances(made), chosen(made, KL)
    # Eq. 13: I_KL = {i | rank(Cov(y_i)) <= k N}.
    rank = np.array([sum(other > own for other in cov) + 1 for own in cov])
    assert (found == (rank <= int(KL.share * len(cov)))).all()
    assert found.any()


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_within_the_bounds(seed):
    made = samples(seed, rows=12)
    cov = covariances(made)
    within = (cov > CLIP.covariance_low) & (cov < CLIP.covariance_high)
    # Eq. 11: as many as r N, drawn uniformly from those within the bounds.
    count = min(int(CLIP.share * len(cov)), within.sum())
    draws = [chosen(made, CLIP, draw) for draw in range(200)]
    assert all(draw.sum() == count and not (draw & ~within).any() for draw in draws)
    assert (np.array(draws).any(0) == within).all()


def test_at_least_one_token_is_chosen_and_none_of_none():
    made = samples(1)
    assert chosen(made, KlCovLoss(share=1e-6)).sum() == 1
    assert chosen(made, ClipCovLoss(covariance_low=1e6, covariance_high=1e7)).sum() == 0
    assert chosen([replace(sample, **{name: np.zeros(0) for name in ("pi", "proximal", "mu", "reference", "advantages")})
                   for sample in made], KL).sum() == 0  # fmt: skip


@pytest.mark.parametrize("loss", [CLIP, KL], ids=lambda loss: loss.kind)
def test_value_and_gradient_are_those_of_the_paper(loss):
    chance = np.random.default_rng(3)
    pi, proximal, advantages = -chance.exponential(1, 40), -chance.exponential(1, 40), chance.normal(0, 1, 40)
    proximal = pi + chance.normal(0, 0.3, 40)
    flags = chance.random(40) < 0.3

    def of_the_paper(pi: np.ndarray) -> np.ndarray:
        ratio = np.exp(pi - proximal)
        if loss.kind == "kl_cov":  # eq. 14: E[r A] and E[r A - beta D] with D = |log r|, as the authors estimate it
            return -ratio * advantages + flags * loss.coefficient * np.abs(pi - proximal)
        clipped = np.minimum(ratio * advantages, np.clip(ratio, 1 - loss.low, 1 + loss.high) * advantages)
        return np.where(flags, 0.0, -clipped)  # eq. 12: 0 for the tokens of I_clip

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values)[None]

    trained = tensor(pi).requires_grad_()
    batch = TokenBatch(
        logprobs_BT=trained,
        proximal_BT=tensor(proximal),
        sampler_BT=tensor(proximal),
        advantages_BT=tensor(advantages),
        mask_BT=torch.ones(1, 40, dtype=torch.bool),
        row_index_BT=torch.zeros(1, 40, dtype=torch.int64),
        chosen_BT=tensor(flags),
    )
    found = loss_terms(batch, loss)
    found.terms_BT.sum().backward()
    assert np.allclose(found.terms_BT.detach().numpy()[0], of_the_paper(pi), atol=1e-12)
    step = 1e-6
    slopes = (of_the_paper(pi + step) - of_the_paper(pi - step)) / (2 * step)
    assert np.allclose(trained.grad.numpy()[0], slopes, atol=1e-6)
    assert (found.clipped_BT.numpy()[0][flags] == (loss.kind == "clip_cov")).all()


@pytest.mark.parametrize("loss", [CLIP, KL], ids=lambda loss: loss.kind)
def test_micro_batches_change_neither_loss_nor_gradient(model_dir, rows, loss):
    objective, results = Objective(loss=loss, correction=NoCorrection()), []
    for budget in (10_000, 24):
        state = make_state(PolicyModel.load(model_dir), OptimizerSettings(learning_rate=1e-2))
        settings = StepSettings(token_budget=budget, objective=objective)
        known = [[value + 0.1 for value in each] for each in logprobs_of(state.policy, rows, settings=settings)]
        results.append(train_step(state, rows, settings=settings, proximal_logprobs=known, seed=3))
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_batch_trains_with_either_loss(model_dir, rows, minibatches):
    for loss in (CLIP, KL):
        state = make_state(PolicyModel.load(model_dir), OptimizerSettings(learning_rate=1e-2))
        settings = StepSettings(objective=Objective(loss=loss))
        results = train_batch(state, rows, settings=settings, batch=BatchSettings(minibatches=minibatches), seed=1)
        assert [result.skipped for result in results] == [False] * minibatches
        assert (results[0].metrics["clipped_share"] > 0) == (loss.kind == "clip_cov")


def test_bounds_of_the_covariance_in_the_wrong_order_are_refused():
    with pytest.raises(ValidationError, match="covariance_low must be less than covariance_high"):
        ClipCovLoss(covariance_low=5.0, covariance_high=1.0)
