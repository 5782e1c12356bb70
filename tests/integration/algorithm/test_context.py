"""Rows that are split by positions over ranks train as whole ones do, on real processes over Gloo."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fulmen_algorithm.losses.objectives import GspoLoss, Objective, SequenceMaskCorrection
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2, Precision
from fulmen_algorithm.training.passes import Attention, PassSettings
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import LoraSettings, PackingMode, StepSettings
from tests.support.algorithm import context
from tests.support.algorithm.context import Work
from tests.support.algorithm.models import small_model
from tests.support.algorithm.trainers import model_dir
from tests.support.exchange.hook_ranks import RankPool
from tests.support.soak import long_but

__all__ = ["model_dir"]

pytestmark = [
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(300),  # the first one waits until processes with torch have started
]

Run = Callable[..., list[Any]]
TWO, FOUR = Ddp(ranks=2, context=2), Ddp(ranks=4, context=4)
GROUPS = {
    "ddp, 2 ranks": ComputeSettings(parallel=TWO),
    "ddp, 4 ranks": ComputeSettings(parallel=FOUR),
    "ddp, 2 of 4 ranks": ComputeSettings(parallel=Ddp(ranks=4, context=2)),
    "fsdp2, 2 ranks, checkpointing": ComputeSettings(parallel=Fsdp2(ranks=2, context=2), gradient_checkpointing=True),
    "fsdp2, 2 of 4 ranks": ComputeSettings(parallel=Fsdp2(ranks=4, context=2)),
    "fsdp2, 2 copies": ComputeSettings(parallel=Fsdp2(ranks=4, shard=2, context=2), gradient_checkpointing=True),
    "ddp, eager": ComputeSettings(parallel=TWO, passes=PassSettings(attention=Attention.EAGER)),
}
GSPO = Objective(loss=GspoLoss(), correction=SequenceMaskCorrection())
OBJECTIVES = {"grpo": Objective(), "gspo": GSPO, "sft": None}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    found = RankPool(4, context.__name__)
    yield found
    found.close()


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns what does something on a number of ranks at once."""

    def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        return pool.run(tmp_path_factory.mktemp("ranks"), ranks, work, *arguments)

    return on_ranks


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Returns rows of odd lengths, from 2 tokens, which is less than a chunk, to 61, of which each of four ranks has some."""
    return [row_of(index, length) for index, length in enumerate((2, 3, 7, 13, 53, 29, 61, 5, 37))]


def row_of(index: int, length: int) -> Row:
    chance = random.Random(index)
    completion = [chance.randrange(6, 25) for _ in range(max(1, length // 2))]
    return row_from_completion(
        rollout_id=f"rollout-{index // 2}",
        prompt_ids=[chance.randrange(25) for _ in range(length - len(completion))],
        completion_ids=completion,
        logprobs=[-chance.uniform(2.0, 4.0) for _ in completion],
        advantage=chance.uniform(-1, 1),
        version=index % 3,
    )


def model_of(folder: Path, small: Path, **config: Any) -> Path:
    """Stores an untrained model of some architecture with the tokenizer of another one."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(small)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "eos_token_id": tokenizer.eos_token_id}
    made = AutoConfig.for_model(vocab_size=len(tokenizer), **(sizes | config))
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_same(run: Run, work: Work) -> None:
    """Compares what the ranks of some work compute with what one process computes."""
    one = replace(work, compute=replace_parallel(work.compute))
    [expected] = run(1, context.trained, one)
    for found in run(work.compute.parallel.ranks, context.trained, work):
        for mine, theirs in zip(found["numbers"], expected["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        for some, others in zip(found["metrics"], expected["metrics"], strict=True):
            assert some == pytest.approx(others, rel=1e-3, abs=1e-5)
        for some, others in zip(found["logprobs"], expected["logprobs"], strict=True):
            assert some[1:] == pytest.approx(others[1:], abs=1e-4)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


def replace_parallel(compute: ComputeSettings) -> ComputeSettings:
    """Returns the same passes in one process."""
    return ComputeSettings(passes=compute.passes, gradient_checkpointing=compute.gradient_checkpointing)


@pytest.mark.parametrize("width", [1, 32, 41])
def test_each_rank_has_a_chunk_from_the_beginning_and_one_from_the_end_and_gradients_of_keys_are_summed(run, width):
    found = run(2, context.dealt, width)
    size = 8 * -(-width // 32)
    chunks = [[n + 1 if n < width else 0 for n in range(c * size, (c + 1) * size)] for c in range(4)]
    assert [mine for mine, _, _ in found] == [chunks[0] + chunks[3], chunks[1] + chunks[2]]
    assert all(joined for _, joined, _ in found)
    # Each key is twice in the sum, as a key and as a value, on both ranks: 2 * (1 + 2).
    assert [gradient for _, _, gradient in found] == [[[6.0] * 2 * size] * 2] * 2


@pytest.mark.parametrize(
    ("group", "objective", "packing"),
    long_but(
        [
            ("ddp, 2 ranks", "grpo", PackingMode.PACKED),
            ("ddp, 4 ranks", "gspo", PackingMode.PADDED),
            ("fsdp2, 2 of 4 ranks", "sft", PackingMode.PACKED),
            ("fsdp2, 2 ranks, checkpointing", "gspo", PackingMode.PACKED),
        ],
        [(group, objective, packing) for group in GROUPS for objective in OBJECTIVES for packing in PackingMode],
    ),
)
def test_losses_norms_metrics_and_weights_are_those_of_one_process(group, objective, packing, run, model_dir, rows):
    asked = OBJECTIVES[objective]
    step = StepSettings(token_budget=64, packing=packing, objective=asked or Objective())
    assert_same(run, Work(model_dir=model_dir, rows=rows, compute=GROUPS[group], step=step, supervised=asked is None))


def test_a_rank_whose_positions_do_not_train_takes_part_in_the_backward_pass(run, model_dir):
    # All that trains is in one chunk.
    row = row_of(1, 32)
    mask = tuple(n == 30 for n in range(32))
    row = replace(row, loss_mask=mask, advantages=tuple(0.5 * m for m in mask))
    for parallel in (FOUR, Fsdp2(ranks=4, context=4)):
        work = Work(model_dir=model_dir, rows=[row], compute=ComputeSettings(parallel=parallel), supervised=True)
        assert_same(run, work)


def test_adapters_train_on_split_rows(run, model_dir, rows):
    lora = LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    for parallel in (TWO, Fsdp2(ranks=2, context=2)):
        assert_same(run, Work(model_dir=model_dir, rows=rows, compute=ComputeSettings(parallel=parallel), lora=lora))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "norms of heads": {"model_type": "qwen3", "tie_word_embeddings": True, **HEADS},
    "sliding windows": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        **HEADS,
    },
    "capped logits": {"model_type": "gemma2", "final_logit_softcapping": 3.0, "sliding_window": 6, **HEADS},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "learned positions": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("architecture", long_but(["sliding windows", "capped logits"], ARCHITECTURES))
@pytest.mark.parametrize("packing", PackingMode)
def test_other_architectures_train_on_split_rows(architecture, packing, run, model_dir, rows, tmp_path):
    folder = model_of(tmp_path / "model", model_dir, **ARCHITECTURES[architecture])
    step = StepSettings(token_budget=64, packing=packing)
    assert_same(run, Work(model_dir=folder, rows=rows, compute=ComputeSettings(parallel=TWO), step=step))


def test_split_rows_compute_in_bf16(run, model_dir, rows):
    one = Work(model_dir=model_dir, rows=rows, supervised=True, compute=ComputeSettings(precision=Precision.BF16))
    [expected] = run(1, context.trained, one)
    for parallel in (TWO, Fsdp2(ranks=2, context=2)):
        work = replace(one, compute=ComputeSettings(parallel=parallel, precision=Precision.BF16))
        for found in run(2, context.trained, work):
            losses = [[loss for loss, _ in each["numbers"]] for each in (found, expected)]
            assert losses[0] == pytest.approx(losses[1], rel=0.02)


CONVOLUTION = {"layer_types": ["conv", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "lfm2", **CONVOLUTION}, "layers of kind conv"),
        ({"model_type": "mamba", "state_size": 4}, "has conv_kernel"),
    ],
    ids=["convolutions", "state spaces"],
)
def test_a_model_whose_positions_meet_otherwise_is_refused_when_it_is_loaded(config, text, run, model_dir, tmp_path):
    folder = model_of(tmp_path / "model", model_dir, **config)
    found = run(2, context.opened, Work(model_dir=folder, rows=[], compute=ComputeSettings(parallel=TWO)))
    assert all(text in problem for problem in found), found


def test_a_model_of_which_only_a_trial_shows_that_positions_meet_is_refused_on_every_rank(run, model_dir):
    for parallel in (TWO, Fsdp2(ranks=2, context=2)):
        work = Work(model_dir=model_dir, rows=[], compute=ComputeSettings(parallel=parallel))
        found = run(2, context.opened_with_shifted_tokens, work)
        assert all("the model's results differ" in problem for problem in found), found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_mask_is_left_after_a_step(checkpointing, run, model_dir, rows):
    compute = ComputeSettings(parallel=TWO, gradient_checkpointing=checkpointing)
    assert run(2, context.masks_left, Work(model_dir=model_dir, rows=rows, compute=compute)) == [0, 0]


def test_two_ranks_keep_about_half_of_the_activations_of_a_long_row(run, tmp_path):
    # As wide that activations outweigh the mask.
    folder = small_model(tmp_path / "model", hidden=256)
    work = Work(model_dir=folder, rows=[row_of(3, 2048)], step=StepSettings(token_budget=2048))
    [one] = run(1, context.kept_bytes, work)
    found = run(2, context.kept_bytes, replace(work, compute=ComputeSettings(parallel=TWO)))
    assert all(kept < 0.7 * one for kept in found), (one, found)
