"""A step on answers has the loss and the gradient of TRL's `DPOTrainer` and `KTOTrainer`, on the same model and tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fulmen_algorithm.algorithms.offline.answer_steps import ALONG_THE_SLOPES
from fulmen_algorithm.algorithms.offline.answers import Answer
from fulmen_algorithm.algorithms.offline.kto import mismatched
from fulmen_algorithm.algorithms.offline.preference_losses import (
    IpoLoss,
    Measured,
    PairLoss,
    SigmoidLoss,
    Slopes,
    pair_slopes,
    single_slopes,
)
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion, spread_advantage
from fulmen_algorithm.training.settings import OptimizerSettings, Sgd, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_step

# TRL and the trainer below it warn about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (5, 3, 7, 1)
BETA = 0.3
STEP = StepSettings(token_budget=24, max_grad_norm=float("inf"), objective=ALONG_THE_SLOPES)


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> PolicyModel:
    return PolicyModel.load(model_dir)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PolicyModel:
    """A policy in the neighbourhood."""
    made = PolicyModel.load(model_dir)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Two pairs, the chosen answer first; the answers of a pair have the same prompt."""
    chance, made = np.random.default_rng(2), []
    for index, length in enumerate(LENGTHS):
        if index % 2 == 0:
            prompt = chance.integers(0, 20, 3).tolist()
        row = row_from_completion(
            rollout_id=str(index),
            prompt_ids=prompt,
            completion_ids=chance.integers(0, 20, length).tolist(),
            logprobs=[0.0] * length,
            advantage=0.0,
            version=0,
        )
        made.append(Answer(name=str(index), group=str(index // 2), rows=(row,), reward=float(index % 2 == 0)))
    return made


def measured(policy: PolicyModel, reference: PolicyModel, answers: Sequence[Answer]) -> list[Measured]:
    rows = [answer.rows[0] for answer in answers]
    pairs = zip(logprobs_of(policy, rows, settings=STEP), logprobs_of(reference, rows, settings=STEP), strict=True)
    return [
        Measured(ratio=sum(own[3:]) - sum(other[3:]), tokens=answer.tokens)
        for answer, (own, other) in zip(answers, pairs, strict=True)
    ]


def gradient_along(model_dir: Path, answers: Sequence[Answer], slopes: Slopes) -> torch.Tensor:
    """Takes the step with SGD at rate 1, whose change of the weights is the negative gradient."""
    trained = PolicyModel.load(model_dir)
    before = [p.detach().clone() for p in trained.model.parameters()]
    state = make_state(trained, OptimizerSettings(learning_rate=1.0, rule=Sgd()))
    rows = [
        replace(answer.rows[0], advantages=spread_advantage(-slope * len(answers), answer.rows[0].loss_mask))
        for answer, slope in zip(answers, slopes.by_answer, strict=True)
    ]
    assert not train_step(state, rows, settings=STEP).skipped
    return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, trained.model.parameters(), strict=True)])


def laid_out(rows: Sequence[Row], prefix: str = "") -> dict[str, torch.Tensor]:
    width = max(len(row.token_ids) for row in rows)

    def padded(values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([[*each, *[0] * (width - len(each))] for each in values])

    return {
        f"{prefix}input_ids": padded([row.token_ids for row in rows]),
        f"{prefix}attention_mask": padded([[1] * len(row.token_ids) for row in rows]),
        f"{prefix}completion_mask": padded([[int(trains) for trains in row.loss_mask] for row in rows]),
    }


def gradient_of(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trl_trainer(kind: str, policy: PolicyModel, reference: PolicyModel, folder: Path, **choices: Any) -> Any:
    import trl  # it takes seconds, in every process of the tests
    from datasets import Dataset

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        beta=BETA,
        per_device_train_batch_size=4,
        **choices,
    )
    data: dict[str, list[Any]] = {"prompt": ["1", "2", "3", "4"]}
    data |= (
        {"chosen": ["2"] * 4, "rejected": ["3"] * 4}
        if kind == "DPO"
        else {"completion": ["2", "3"] * 2, "label": [True, False] * 2}
    )
    made = getattr(trl, f"{kind}Trainer")(
        # TRL patches the forward of the model that it is given.
        model=copy.deepcopy(policy.model),
        ref_model=copy.deepcopy(reference.model),
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=policy.tokenizer,
    )
    made.model.eval()
    return made


@pytest.mark.parametrize(
    ("loss", "choices"),
    [
        (SigmoidLoss(beta=BETA), {"loss_type": ["sigmoid"]}),
        (IpoLoss(kind="ipo", beta=BETA), {"loss_type": ["ipo"]}),
    ],
)
def test_a_step_of_dpo_is_that_of_trl(
    loss: PairLoss, choices: dict[str, Any], model_dir, policy, reference, answers, tmp_path
):
    found = measured(policy, reference, answers)
    slopes = pair_slopes([(found[0], found[1]), (found[2], found[3])], loss)
    ours = gradient_along(model_dir, answers, slopes)

    trainer = trl_trainer("DPO", policy, reference, tmp_path, **choices)
    chosen_first = [answers[i].rows[0] for i in (0, 2, 1, 3)]
    theirs = trainer._compute_loss(trainer.model, laid_out(chosen_first), return_outputs=False)

    assert slopes.loss == pytest.approx(float(theirs), rel=1e-5)
    torch.testing.assert_close(ours, gradient_of(trainer.model, theirs), rtol=1e-3, atol=2e-6)


def test_a_step_of_kto_is_that_of_trl(model_dir, policy, reference, answers, tmp_path):
    swapped = mismatched(answers, token_budget=100)
    own, others = measured(policy, reference, answers), measured(policy, reference, swapped)
    divergence = max(0.0, sum(m.ratio for m in others) / len(others))
    wanted = [True, False, True, False]
    slopes = single_slopes(
        list(zip(own, wanted, strict=True)), divergence=divergence, beta=BETA, desirable_weight=1.5,
        undesirable_weight=0.5,
    )  # fmt: skip
    ours = gradient_along(model_dir, answers, slopes)

    trainer = trl_trainer("KTO", policy, reference, tmp_path, desirable_weight=1.5, undesirable_weight=0.5)
    inputs = laid_out([answer.rows[0] for answer in answers])
    inputs |= laid_out([answer.rows[0] for answer in swapped], "KL_") | {"label": torch.tensor(wanted)}
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)

    assert slopes.loss == pytest.approx(float(theirs), rel=1e-5)
    torch.testing.assert_close(ours, gradient_of(trainer.model, theirs), rtol=1e-3, atol=2e-6)
