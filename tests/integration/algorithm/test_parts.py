"""Models in parts: loading, checkpoints and published weights, on real ranks of which none ever has all weights."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fulmen_algorithm.tiny_model import ModelSize, save_model
from fulmen_algorithm.training.compute import Ddp, Fsdp2, OneProcess, ParallelSettings, Precision
from fulmen_algorithm.training.settings import LoraSettings, Sgd, WeightsKind
from fulmen_algorithm.weights.delta import DELTA_FILE, apply
from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm import parts
from tests.support.algorithm.copies import Case
from tests.support.algorithm.parts import Large
from tests.support.algorithm.trainers import model_dir, rows
from tests.support.exchange.hook_ranks import RankPool
from tests.support.soak import long_but

__all__ = ["model_dir", "rows"]

pytestmark = [
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(300),  # the first one waits until processes with torch have started
]

Run = Callable[..., list[Any]]
FOUR = Fsdp2(ranks=4)
SHARE = 0.6


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Yields processes for four ranks."""
    found = RankPool(4, parts.__name__)
    yield found
    found.close()


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns what does something on a number of ranks at once."""

    def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        return pool.run(tmp_path_factory.mktemp("ranks"), ranks, work, *arguments)

    return on_ranks


def model_of(folder: Path, small: Path, **config: Any) -> Path:
    """Stores an untrained model of some architecture, in bfloat16, with the tokenizer of another one."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(small)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = AutoConfig.for_model(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, intermediate_size=64, **sizes, **config
    )
    AutoModelForCausalLM.from_config(made).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_critic_is_in_parts_as_the_policy_is_with_a_fresh_head(run, model_dir):
    for held, fresh in run(2, parts.share_of_critic, Fsdp2(ranks=2), model_dir):
        assert held == pytest.approx(0.5, abs=0.05)
        assert fresh


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama, not tied": {"model_type": "llama"},
    # Its files have a tensor for each expert, and the model in memory one for all.
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}


ADAPTERS = LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("architecture", "lora"),
    long_but(
        [("mixtral", None), ("qwen3, tied", ADAPTERS)],
        [(name, lora) for name in ARCHITECTURES for lora in (None, ADAPTERS)],
    ),
    ids=lambda value: value if isinstance(value, str) else "adapters" if value else "weights",
)
def test_each_rank_reads_its_rows_and_all_are_the_weights_of_the_files_bit_for_bit(
    architecture, lora, run, model_dir, tmp_path
):
    folder = model_of(tmp_path / "model", model_dir, **ARCHITECTURES[architecture])
    for parallel in (FOUR, Fsdp2(ranks=4, shard=2)):
        for found in run(4, parts.load_both, parallel, folder, lora):
            assert (found["names"], found["weights"], found["buffers"]) == (set(), [], [])
            assert found["traits"]
            assert found["tied"]
            # A tensor with fewer rows than ranks is not spread evenly.
            assert found["held"] < 1.2 / parallel.ranks_per_copy


SPLIT_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "norms of heads": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    "biases": {"model_type": "qwen2"},
    "capped logits": {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize("architecture", long_but(["capped logits"], SPLIT_ARCHITECTURES))
def test_split_matrices_train_as_whole_ones_do_and_stay_equal_on_all_ranks(
    architecture, run, model_dir, rows, tmp_path
):
    folder = model_of(tmp_path / "model", model_dir, **SPLIT_ARCHITECTURES[architecture])
    # Steps of SGD have the size of the gradients, so that each gradient counts.
    one = Case(model_dir=folder, rows=rows, parallel=OneProcess(), rule=Sgd(momentum=0.9), learning_rate=0.1)
    [(expected, weights)] = run(1, parts.losses_norms_and_weights, one, Precision.FP32)
    split = replace(one, parallel=Ddp(ranks=2, tensor=2))
    for found, others in run(2, parts.losses_norms_and_weights, split, Precision.FP32):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-5)
    (_, first), (_, second) = run(2, parts.losses_norms_and_weights, split, Precision.FP32)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_split_matrices_compute_in_bf16(run, model_dir, rows):
    one = Case(model_dir=model_dir, rows=rows, parallel=OneProcess())
    [(expected, _)] = run(1, parts.losses_norms_and_weights, one, Precision.BF16)
    [(found, _), _] = run(
        2, parts.losses_norms_and_weights, replace(one, parallel=Ddp(ranks=2, tensor=2)), Precision.BF16
    )
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=0.02)


def named(parallel: ParallelSettings) -> str:
    return f"{parallel.kind}, {parallel.ranks} ranks" + (
        f" in {parallel.copies} copies" if isinstance(parallel, Fsdp2) else ""
    )


PLACEMENTS = [(1, 0), (2, 0), *((ranks, shard) for ranks in (2, 3, 4) for shard in (1, 2, 3, 4) if ranks % shard == 0)]
SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writers=st.sampled_from(PLACEMENTS), readers=st.sampled_from(PLACEMENTS), shapes=SHAPES)
def test_what_some_ranks_write_any_others_read(run, tmp_path_factory, writers, readers, shapes):
    folder = tmp_path_factory.mktemp("parts")
    dtypes = itertools.cycle([torch.float32, torch.bfloat16])
    tensors = {
        f"{i}.weight": torch.randn(shape).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    run(writers[0], parts.store, *writers, tensors, folder)
    size = sum(tensor.numel() for one in folder.iterdir() for tensor in _tensors_in(one).values())
    assert size == sum(tensor.numel() for tensor in tensors.values())
    assert run(readers[0], parts.restore, *readers, tensors, folder) == [[]] * readers[0]


def _tensors_in(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


HYBRID = Fsdp2(ranks=4, shard=2)
MOVES = [
    (earlier, later)
    for earlier in (OneProcess(), HYBRID, FOUR)
    for later in (OneProcess(), Ddp(ranks=2), Fsdp2(ranks=3), HYBRID, FOUR)
]


@pytest.mark.parametrize(
    ("earlier", "later"),
    long_but([(HYBRID, Ddp(ranks=2)), (FOUR, Fsdp2(ranks=3))], MOVES),
    ids=named,
)
def test_a_state_is_restored_by_any_number_of_ranks_and_parts(earlier, later, run, model_dir, rows, tmp_path):
    def case(parallel: ParallelSettings) -> Case:
        return Case(model_dir=model_dir, rows=rows, parallel=parallel)

    written = run(earlier.ranks, parts.train_and_store, case(earlier), 2, tmp_path)[0]
    for found in run(later.ranks, parts.open_and_restore, case(later), tmp_path):
        assert found.keys() == written.keys()
        assert (found["steps"], found["norms"]) == (2, written["norms"])
        assert [
            name for name, one in written.items() if torch.is_tensor(one) and not torch.equal(found[name], one)
        ] == []
    assert {"exp_avg", "exp_avg_sq", "step"} <= {name.rpartition("/")[2] for name in written}


def test_a_model_that_the_library_converts_is_restored_too(run, model_dir, rows, tmp_path):
    mixtral = model_of(tmp_path / "model", model_dir, **ARCHITECTURES["mixtral"])
    case = Case(model_dir=mixtral, rows=rows, parallel=FOUR)
    (tmp_path / "state").mkdir()
    written = run(4, parts.train_and_store, case, 1, tmp_path / "state")[0]
    for parallel in (OneProcess(), Fsdp2(ranks=2)):
        for found in run(parallel.ranks, parts.open_and_restore, replace(case, parallel=parallel), tmp_path / "state"):
            assert all(torch.equal(one, found[name]) for name, one in written.items() if torch.is_tensor(one))


@pytest.mark.parametrize("parallel", long_but([HYBRID], [HYBRID, Ddp(ranks=2)]), ids=named)
def test_the_ranks_of_any_copy_write_the_state_without_the_others(parallel, run, model_dir, rows, tmp_path):
    case = Case(model_dir=model_dir, rows=rows, parallel=parallel)
    written = run(parallel.ranks, parts.store_by_last_copy, case, tmp_path)
    assert written[0] is None
    for found in run(4, parts.open_and_restore, replace(case, parallel=FOUR), tmp_path):
        assert found.keys() == written[-1].keys()
        assert all(torch.equal(one, found[name]) for name, one in written[-1].items() if torch.is_tensor(one))


@pytest.fixture(scope="module")
def large(model_dir, rows, tmp_path_factory) -> Large:
    """Returns a model of 57 million parameters, whose layers and embeddings are a small share of it."""
    folder = tmp_path_factory.mktemp("large")
    size = ModelSize(hidden=384, layers=24, heads=4, mlp=1536)
    save_model(AutoTokenizer.from_pretrained(model_dir), str(folder), 0, size)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return Large(model_dir=folder, tiny_dir=model_dir, rows=rows[:4], parallel=FOUR, share=SHARE)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by Linux's count")
def test_no_rank_of_four_needs_the_memory_of_the_whole_model(run, large, tmp_path):
    [error] = run(1, parts.load_whole, large)
    assert "can't allocate memory" in error
    found = run(4, parts.work_in_parts, large, tmp_path)
    assert all(each["restored"] for each in found)
    assert [each["full"] is None for each in found] == [False, True, True, True]
    full, delta = found[0]["full"], found[0]["delta"]
    assert (full.kind, delta.kind) == (WeightsKind.FULL, WeightsKind.DELTA)
    assert full.full_bytes == pytest.approx(large.file_bytes, rel=1e-3)
    weights = read_folder(tmp_path / "0/full")
    assert weights.sha256() == full.sha256
    assert apply(weights, tmp_path / "0/delta" / DELTA_FILE).sha256() == delta.sha256
