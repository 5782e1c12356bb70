"""A step of `reward_model` has the loss of the papers, and loss and gradient of TRL's `RewardTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fulmen_algorithm.algorithms.offline.answer_steps import ALONG_THE_SLOPES
from fulmen_algorithm.algorithms.offline.reward_model import score_slopes
from fulmen_algorithm.algorithms.score_rows import score_rows, score_tokens, scores_of
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import OptimizerSettings, Sgd, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_step

# TRL and the trainer below it warn about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore")

STEP = StepSettings(token_budget=24, max_grad_norm=float("inf"), objective=ALONG_THE_SLOPES)
MARGINS = (0.5, 0.0)


def reference_loss(scores: np.ndarray, margins: np.ndarray, centring: float) -> float:
    """Eq. 2 of arXiv:2307.09288, and the regulariser of section 2 of arXiv:2312.09244; scores are [P, 2]."""
    chosen, rejected = scores.T
    odds = 1 / (1 + np.exp(-(chosen - rejected - margins)))
    return float(np.mean(-np.log(odds)) + centring * np.mean((chosen + rejected) ** 2))


@pytest.mark.parametrize("centring", [0.0, 0.01, 0.5])
def test_loss_and_slopes_are_those_of_the_papers(centring):
    chance = np.random.default_rng(3)
    scores, margins = chance.normal(0, 2, (5, 2)), chance.exponential(1.0, 5)
    found = score_slopes([(c, r) for c, r in scores.tolist()], margins.tolist(), centring=centring)
    assert found.loss == pytest.approx(reference_loss(scores, margins, centring), rel=1e-12)
    numeric, h = [], 1e-6
    for place in np.ndindex(5, 2):
        up, down = scores.copy(), scores.copy()
        up[place] += h
        down[place] -= h
        numeric.append((reference_loss(up, margins, centring) - reference_loss(down, margins, centring)) / (2 * h))
    assert found.by_score == pytest.approx(numeric, abs=1e-8)


def test_scores_that_are_far_apart_do_not_overflow():
    found = score_slopes([(-2000.0, 2000.0), (2000.0, -2000.0)], [0.0, 0.0], centring=0.0)
    assert found.loss == pytest.approx(2000.0)
    assert found.by_score == pytest.approx([-0.5, 0.5, 0.0, 0.0])


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Two pairs, the chosen answer first; what follows an answer is cut."""
    chance = np.random.default_rng(2)
    return [
        row_from_completion(
            rollout_id=str(length),
            prompt_ids=chance.integers(6, 20, 3).tolist(),
            completion_ids=chance.integers(6, 20, length).tolist(),
            logprobs=[0.0] * length,
            advantage=0.0,
            version=0,
        )
        for length in (5, 3, 7, 1)
    ]


def gradients(model_dir: Path, rows: list[Row], by_score: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """Takes the step with SGD at rate 1, whose change of the weights is the negative gradient."""
    trained = PolicyModel.load(model_dir)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    state = make_state(trained, OptimizerSettings(learning_rate=1.0, rule=Sgd()))
    tokens = score_tokens(trained.tokenizer)
    marked = [
        each
        for row, slope in zip(rows, by_score, strict=True)
        for each in score_rows(row, tokens, slope=-slope * 2 * len(rows))
    ]
    assert not train_step(state, marked, settings=STEP).skipped
    return {name: before[name] - p.detach() for name, p in trained.model.named_parameters()}


def trl_trainer(model: torch.nn.Module, policy: PolicyModel, folder: Path, centring: float) -> Any:
    import trl  # it takes seconds, in every process of the tests
    from datasets import Dataset

    config = trl.RewardConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], center_rewards_coefficient=centring or None
    )
    data = Dataset.from_dict({"prompt": ["1", "2"], "chosen": ["2", "2"], "rejected": ["3", "3"]})
    made = trl.RewardTrainer(model=model, args=config, train_dataset=data, processing_class=policy.tokenizer)
    made.model.eval()
    return made


@pytest.mark.parametrize(("centring", "margins"), [(0.0, (0.0, 0.0)), (0.3, MARGINS)])
def test_a_step_is_that_of_trl(centring, margins, model_dir, rows, tmp_path):
    policy = PolicyModel.load(model_dir)
    good, bad = score_tokens(policy.tokenizer)
    marked = [each for row in rows for each in score_rows(row, (good, bad))]
    scores = scores_of(logprobs_of(policy, marked, settings=STEP))
    slopes = score_slopes([(scores[0], scores[1]), (scores[2], scores[3])], margins, centring=centring)
    ours = gradients(model_dir, rows, slopes.by_score)

    classifier = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1, dtype=torch.float32)
    output = policy.model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        # The head of a reward model is the difference of two rows of the output layer.
        classifier.score.weight.copy_((output[good] - output[bad])[None])
    pad = classifier.config.pad_token_id = policy.pad_token_id
    width = max(len(row.token_ids) for row in rows)
    chosen_first = [rows[i] for i in (0, 2, 1, 3)]
    trainer = trl_trainer(classifier, policy, tmp_path, centring)
    inputs = {
        "input_ids": torch.tensor([[*r.token_ids, *[pad] * (width - len(r.token_ids))] for r in chosen_first]),
        "attention_mask": torch.tensor(
            [[1] * len(r.token_ids) + [0] * (width - len(r.token_ids)) for r in chosen_first]
        ),
    }
    if any(margins):
        inputs["margin"] = torch.tensor(margins)
    theirs = trainer.compute_loss(trainer.model, inputs)
    assert slopes.loss == pytest.approx(float(theirs), rel=1e-5)

    trainer.model.zero_grad()
    theirs.backward()
    by_name = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    head = by_name.pop("score.weight")[0]
    layer = next(n for n, p in policy.model.named_parameters() if p is policy.model.get_output_embeddings().weight)
    expected = {name: by_name.get(name, torch.zeros_like(grad)).clone() for name, grad in ours.items()}
    expected[layer][good] += head
    expected[layer][bad] -= head
    assert set(by_name) <= set(ours)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=2e-6, msg=name)


def test_rows_are_cut_after_the_answer_and_only_the_mark_trains():
    row = Row(
        rollout_id="r", token_ids=(4, 7, 8, 9), loss_mask=(False, True, True, False), old_logprobs=(0.0,) * 4,
        advantages=(0.0,) * 4, policy_versions=(-1, 0, 0, -1), rewards=(0.0,) * 4, steps=(0,) * 4,
    )  # fmt: skip
    good, bad = score_rows(row, (21, 20), slope=0.5)
    assert (good.token_ids, bad.token_ids) == ((4, 7, 8, 21), (4, 7, 8, 20))
    assert good.loss_mask == bad.loss_mask == (False, False, False, True)
    assert (good.advantages[-1], bad.advantages[-1]) == (0.5, -0.5)
    assert scores_of([[0.0, -1.0], [0.0, -3.0]]) == [2.0]


def test_a_tokenizer_without_the_two_tokens_has_no_reward_model(model_dir):
    tokenizer = PolicyModel.load(model_dir).tokenizer
    # All that it does not know becomes one token.
    tokenizer.encode = lambda text, add_special_tokens: [tokenizer.unk_token_id]
    with pytest.raises(RunFailed, match="the tokenizer does not have them"):
        score_tokens(tokenizer)
