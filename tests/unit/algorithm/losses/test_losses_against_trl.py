"""The loss and its gradient by the weights, beside TRL's `GRPOTrainer` on the same model and tokens.

How TRL's names map: its `grpo` is our `sequence_mean_token_mean`, `dapo` our `token_mean`, `dr_grpo` our
`sequence_mean_token_sum_norm`; all three are our loss `clip`, `delta` is our `dual_clip`, and importance sampling by
sequence is our `gspo`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import policy_loss, token_weights
from fulmen_algorithm.losses.objectives import (
    CispoLoss,
    ClipLoss,
    GspoLoss,
    IcepopCorrection,
    LossKl,
    NoCorrection,
    Objective,
    SapoLoss,
    SequenceCorrection,
    SequenceMaskCorrection,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    TokenCorrection,
    TokenMean,
)
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import PackingMode
from tests.support.algorithm.micro_batches import pack

if TYPE_CHECKING:
    from trl import GRPOTrainer

# TRL and the trainer below it warn about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (5, 3, 7, 1, 4, 6)
LONGEST = 9
LEFT_OUT = float("inf")
OF_THE_CONFIG = ("delta", "use_bias_correction_kl")


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> PolicyModel:
    return PolicyModel.load(model_dir)


@pytest.fixture(scope="module")
def trainer(policy: PolicyModel, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    from datasets import Dataset  # these two take seconds, in every process of the tests
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        use_bias_correction_kl=False,
        report_to=[],
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=LONGEST,
    )
    made = GRPOTrainer(
        model=policy.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1", "2"]}),
        processing_class=policy.tokenizer,
    )
    made.model.eval()  # no dropout, and no share of a gradient accumulation
    return made


@pytest.fixture(scope="module")
def rows(policy: PolicyModel) -> list[Row]:
    chance = np.random.default_rng(2)
    made = []
    for index, length in enumerate(LENGTHS):
        prompt, completion = chance.integers(0, 20, 3).tolist(), chance.integers(0, 20, length).tolist()
        row = row_from_completion(
            rollout_id=str(index),
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=[0.0] * length,
            advantage=float(chance.normal()),
            version=0,
        )
        made.append(row)
    return made


@pytest.fixture(scope="module")
def tokens(policy: PolicyModel, rows: list[Row]) -> dict[str, list[np.ndarray]]:
    """Log-probabilities of the completions under policies in the neighbourhood of the model."""
    chance = np.random.default_rng(3)
    present = []
    with torch.no_grad():
        for row, length in zip(rows, LENGTHS, strict=True):
            logits = policy.model(torch.tensor([row.token_ids])).logits[0, :-1].float().log_softmax(-1)
            picked = logits.gather(-1, torch.tensor(row.token_ids)[1:, None]).squeeze(-1)
            present.append(picked.numpy()[-length:])
    names = {"proximal": 0.3, "sampler": 0.6, "reference": 0.5}
    return {n: [p + chance.normal(0, by, len(p)).astype(np.float32) for p in present] for n, by in names.items()}


def of_trl(trainer: GRPOTrainer, rows: list[Row], tokens: dict[str, list[np.ndarray]], choices: dict) -> torch.Tensor:
    """Returns the loss of `GRPOTrainer._compute_loss`."""
    choices = dict(choices)
    mode, bounds = choices.pop("correction", ""), choices.pop("bounds", (0.0, LEFT_OUT))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in choices.items():
            patch.setattr(trainer.args if name in OF_THE_CONFIG else trainer, name, value)
        width = max(LENGTHS)

        def padded(values: list, filler: float = 0.0) -> torch.Tensor:
            return torch.tensor(np.array([[*v, *[filler] * (width - len(v))] for v in values]))

        mask = padded([[1] * n for n in LENGTHS], 0)
        inputs = {
            "prompt_ids": torch.tensor([row.token_ids[:3] for row in rows]),
            "prompt_mask": torch.ones(len(rows), 3, dtype=torch.long),
            "completion_ids": padded([row.token_ids[3:] for row in rows], 0),
            "completion_mask": mask,
            "advantages": torch.tensor([row.advantages[-1] for row in rows]),
            "old_per_token_logps": padded(tokens["proximal"]).float(),
            "ref_per_token_logps": padded(tokens["reference"]).float(),
            "num_items_in_batch": mask.sum().float(),
        }
        if mode:
            # As `_generate_and_score_completions` makes it, which needs an engine.
            difference = inputs["old_per_token_logps"] - padded(tokens["sampler"]).float() * mask
            if mode.startswith("sequence"):
                difference = (difference * mask).sum(-1, keepdim=True)
            ratio, (low, high) = difference.exp(), bounds
            outside = (ratio < low) | (ratio > high)
            ratio = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
            inputs["importance_sampling_ratio"] = ratio
            patch.setattr(trainer, "use_vllm", True)
        return trainer._compute_loss(trainer.model, inputs)


def of_fulmen(policy: PolicyModel, rows: list[Row], tokens: dict[str, list[np.ndarray]], objective: Objective):
    weights, total = token_weights(rows, objective.aggregation), torch.zeros(())
    for micro in pack(rows, token_budget=24, pad_token_id=0, mode=PackingMode.PADDED):
        owner = micro.row_index_BT

        def laid_out(name: str, owner=owner, trains=micro.loss_mask_BT) -> torch.Tensor:
            tensor = torch.zeros(owner.shape)
            for index in owner.unique().tolist():
                if index >= 0:
                    tensor[(owner == index) & trains] = torch.tensor(tokens[name][index])
            return tensor

        batch = TokenBatch(
            logprobs_BT=policy.token_logprobs(micro),
            proximal_BT=laid_out("proximal"),
            sampler_BT=laid_out("sampler"),
            advantages_BT=micro.advantages_BT,
            mask_BT=micro.loss_mask_BT,
            row_index_BT=owner,
            reference_BT=laid_out("reference"),
        )
        table = torch.tensor([*weights, 0.0])
        total = total + policy_loss(batch, weights_BT=table[owner] * micro.loss_mask_BT, objective=objective)
    return total


def gradients(policy: PolicyModel, loss: torch.Tensor) -> torch.Tensor:
    policy.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


MEAN, NONE, CLIP = SequenceMeanTokenMean(), NoCorrection(), ClipLoss(low=0.2, high=0.28)
BOUNDS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
NARROW = {"epsilon_low": 0.02, "epsilon_high": 0.03, "importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("objective", "choices"),
    [
        (Objective(loss=CLIP, correction=NONE, aggregation=MEAN), {"loss_type": "grpo", **BOUNDS}),
        (Objective(loss=CLIP, correction=NONE, aggregation=TokenMean()), {"loss_type": "dapo", **BOUNDS}),
        (Objective(loss=CLIP, correction=NONE, aggregation=TokenMean()), {"loss_type": "bnpo", **BOUNDS}),
        (
            Objective(loss=CLIP, correction=NONE, aggregation=SequenceMeanTokenSumNorm(length=LONGEST)),
            {"loss_type": "dr_grpo", **BOUNDS},
        ),
        (
            Objective(loss=ClipLoss(dual_clip=1.5), correction=NONE, aggregation=MEAN),
            {"loss_type": "grpo", "delta": 1.5, **BOUNDS},
        ),
        (
            Objective(loss=GspoLoss(low=0.02, high=0.03), correction=NONE, aggregation=MEAN),
            {"loss_type": "grpo", **NARROW},
        ),
        (
            Objective(loss=GspoLoss(low=0.02, high=0.03, form="token"), correction=NONE, aggregation=MEAN),
            {"loss_type": "grpo", **NARROW},
        ),
        (Objective(loss=CispoLoss(ratio_max=1.1), correction=NONE), {"loss_type": "cispo", "epsilon_high": 1.1}),
        (Objective(loss=SapoLoss(), correction=NONE, aggregation=MEAN), {"loss_type": "sapo"}),
        (
            Objective(loss=CLIP, correction=NONE, aggregation=MEAN, kl=LossKl(coefficient=0.1)),
            {"loss_type": "grpo", "beta": 0.1, **BOUNDS},
        ),
        (
            Objective(loss=CLIP, correction=NONE, aggregation=MEAN, kl=LossKl(coefficient=0.1, weighted=True)),
            {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True, **BOUNDS},
        ),
        (
            Objective(loss=CLIP, correction=TokenCorrection(cap=1.2)),
            {"loss_type": "dapo", "correction": "token_truncate", "bounds": (0.0, 1.2), **BOUNDS},
        ),
        (
            Objective(loss=CLIP, correction=SequenceCorrection(cap=1.2)),
            {"loss_type": "dapo", "correction": "sequence_truncate", "bounds": (0.0, 1.2), **BOUNDS},
        ),
        (
            Objective(loss=CLIP, correction=SequenceMaskCorrection(cap=1.5), kl=LossKl(coefficient=0.1)),
            {"loss_type": "dapo", "correction": "sequence_mask", "bounds": (0.0, 1.5), "beta": 0.1, **BOUNDS},
        ),
        (
            Objective(loss=CLIP, correction=IcepopCorrection(low=0.7, high=1.4)),
            {"loss_type": "dapo", "correction": "token_mask", "bounds": (0.7, 1.4), **BOUNDS},
        ),
    ],
    ids=lambda value: str(value.get("correction", value["loss_type"])) if isinstance(value, dict) else value.loss.kind,
)
def test_loss_and_gradient_are_those_of_trl(trainer, policy, rows, tokens, objective, choices):
    theirs, ours = of_trl(trainer, rows, tokens, choices), of_fulmen(policy, rows, tokens, objective)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    by_us, by_them = gradients(policy, ours), gradients(policy, theirs)
    assert by_them.norm() > 0.1
    assert torch.allclose(by_us, by_them, rtol=1e-3, atol=1e-5)
