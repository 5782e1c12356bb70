"""The entropy of the policy: its value and gradient, as a metric and as a bonus, and what it is for."""

import warnings

import numpy as np
import pytest
import torch

from fulmen_algorithm.losses.entropy_settings import EntropyTarget
from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import policy_loss
from fulmen_algorithm.losses.objectives import ClipLoss, NoCorrection, Objective
from fulmen_algorithm.training import scorer
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import OptimizerSettings, PackingMode, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_step
from fulmen_algorithm.training.token_entropy import entropy_of
from tests.support.algorithm.micro_batches import pack

RATE = OptimizerSettings(learning_rate=3e-3)
BONUS = 0.3


def by_the_definition(logits: np.ndarray) -> np.ndarray:
    """H = -sum_v p_v log p_v in float64."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)


def entropies(policy: PolicyModel, row: Row, temperature: float = 1.0) -> np.ndarray:
    """The entropies before each token of a row, from the whole logits."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([row.token_ids])).logits[0].double().numpy() / temperature
    return by_the_definition(logits)[:-1]


def test_value_and_gradient_are_those_of_the_definition():
    logits = torch.tensor(np.random.default_rng(0).normal(0, 3, (5, 11)), requires_grad=True)

    def entropy(given: torch.Tensor) -> torch.Tensor:
        return entropy_of(given, given.logsumexp(-1))

    assert np.allclose(entropy(logits).detach().numpy(), by_the_definition(logits.detach().numpy()), atol=1e-12)
    assert torch.autograd.gradcheck(entropy, (logits,))


def test_the_value_is_that_of_trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.utils import entropy_from_logits  # it takes seconds, in every process of the tests

    logits = torch.randn(7, 200, generator=torch.Generator().manual_seed(1)) * 4
    assert torch.allclose(entropy_of(logits, logits.logsumexp(-1)), entropy_from_logits(logits), atol=1e-5)


def test_tokens_that_cannot_be_drawn_add_nothing_to_value_or_gradient():
    logits = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    barred = torch.cat([logits, torch.tensor([[-torch.inf]], dtype=torch.float64)], dim=-1).requires_grad_()
    entropy = entropy_of(barred, barred.logsumexp(-1))
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(by_the_definition(logits.numpy())[0])
    assert torch.isfinite(barred.grad).all()


@pytest.mark.parametrize("mode", list(PackingMode))
@pytest.mark.parametrize("pieces", [2**25, 60], ids=["at once", "in pieces"])
def test_every_token_has_the_entropy_of_its_own_distribution(policy, rows, mode, pieces, monkeypatch):
    monkeypatch.setattr(scorer, "LOGITS_AT_ONCE", pieces)
    for micro in pack(rows, token_budget=24, pad_token_id=0, mode=mode):
        found = policy.token_scores(micro, temperature=0.7, trained_only=True, entropy=True).entropy_BT
        assert not found[~micro.loss_mask_BT].any()
        for index in micro.row_index_BT.unique().tolist():
            if index >= 0:
                own = found[micro.row_index_BT == index].detach().numpy()[1:]
                expected = entropies(policy, rows[index], 0.7) * rows[index].loss_mask[1:]
                assert np.allclose(own, expected, atol=1e-5)


def test_pieces_change_no_gradient(policy, rows, monkeypatch):
    slopes = []
    for pieces in (2**25, 60):
        monkeypatch.setattr(scorer, "LOGITS_AT_ONCE", pieces)
        policy.model.zero_grad()
        for micro in pack(rows, token_budget=1000, pad_token_id=0, mode=PackingMode.PADDED):
            policy.token_scores(micro, trained_only=True, entropy=True).entropy_BT.sum().backward()
        slopes.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
    assert slopes[0].norm() > 0.1
    assert torch.allclose(*slopes, atol=1e-5)


def test_the_metric_is_the_mean_over_trained_tokens(policy, rows):
    expected = np.concatenate([entropies(policy, row)[np.array(row.loss_mask[1:])] for row in rows])
    result = train_step(make_state(policy, RATE), rows, settings=StepSettings(token_budget=24))
    assert result.metrics["entropy"] == pytest.approx(expected.mean(), rel=1e-5)


def test_the_bonus_is_subtracted_from_the_loss_with_the_weights_of_its_tokens(model_dir, rows):
    losses, norms = [], []
    for objective in (Objective(), Objective(entropy_coefficient=BONUS)):
        state = make_state(PolicyModel.load(model_dir), RATE)
        result = train_step(state, rows, settings=StepSettings(token_budget=24, objective=objective))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    assert losses[1] == pytest.approx(losses[0] - BONUS * result.metrics["entropy"], rel=1e-5)
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def drawn(policy: PolicyModel, chance: np.random.Generator, count: int) -> list[Row]:
    """Answers of one token, drawn from the policy, with their ids as rewards, centred."""
    prompt = [3, 7]
    with torch.no_grad():
        logprobs = policy.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).double().numpy()
    tokens = chance.choice(len(logprobs), size=count, p=np.exp(logprobs) / np.exp(logprobs).sum())
    rewards = tokens / len(logprobs)
    return [
        row_from_completion(
            rollout_id=str(index),
            prompt_ids=prompt,
            completion_ids=[int(token)],
            logprobs=[float(logprobs[token])],
            advantage=float(reward - rewards.mean()),
            version=0,
        )
        for index, (token, reward) in enumerate(zip(tokens, rewards, strict=True))
    ]


def bandit(policy: PolicyModel, coefficient: float) -> tuple[float, float]:
    """Trains answers of one token to have high ids; returns the mean id, as a share of the highest, and the entropy."""
    state, chance = make_state(policy, RATE), np.random.default_rng(4)
    settings = StepSettings(
        objective=Objective(loss=ClipLoss(), correction=NoCorrection(), entropy_coefficient=coefficient)
    )
    for _ in range(80):
        result = train_step(state, drawn(policy, chance, 32), settings=settings)
    rows = drawn(policy, chance, 400)
    return float(np.mean([row.token_ids[-1] for row in rows])) / policy.model.config.vocab_size, result.metrics[
        "entropy"
    ]


def test_a_policy_learns_with_a_bonus_and_stays_undecided_for_longer(model_dir):
    reward, entropy = bandit(PolicyModel.load(model_dir), 0.0)
    reward_with, entropy_with = bandit(PolicyModel.load(model_dir), 0.05)
    assert min(reward, reward_with) > 0.7
    assert entropy_with > entropy + 0.5


def test_a_target_below_its_own_step_is_refused():
    with pytest.raises(ValueError, match="step must be at most max"):
        EntropyTarget(step=2.0)


def test_a_weight_of_the_entropy_needs_entropies():
    zeros = torch.zeros(1, 2)
    index = torch.zeros(1, 2, dtype=torch.int64)
    batch = TokenBatch(
        logprobs_BT=zeros,
        proximal_BT=zeros,
        sampler_BT=zeros,
        advantages_BT=zeros,
        mask_BT=index == 0,
        row_index_BT=index,
    )
    with pytest.raises(ValueError, match="needs the entropies"):
        policy_loss(batch, weights_BT=zeros, objective=Objective(entropy_coefficient=BONUS))
