"""What tensor parallelism does not go with is refused by the settings and by the model's configuration, all at once."""

import json

import pytest
from pydantic import ValidationError

from fulmen_algorithm.algorithms.sft import SftSettings
from fulmen_algorithm.training.compute import Ddp, Fsdp2
from fulmen_algorithm.training.tensor_plan import folder_problems, split_problems

QWEN = {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64}


def test_a_model_with_a_plan_and_divisible_heads_is_split():
    assert split_problems(QWEN, 4) == []
    assert split_problems({"model_type": "any", "text_config": QWEN}, 2) == []


def test_every_size_that_cannot_be_dealt_evenly_is_named():
    found = split_problems(QWEN | {"intermediate_size": 60}, 8)
    assert found == [
        "tensor: num_key_value_heads, 4 in the model's configuration, is not a multiple of 8",
        "tensor: intermediate_size, 60 in the model's configuration, is not a multiple of 8",
    ]


def test_heads_of_keys_are_as_many_as_those_of_queries_where_nothing_is_said():
    [found] = split_problems({"model_type": "llama", "num_attention_heads": 3}, 2)[:1]
    assert "num_attention_heads, 3" in found


@pytest.mark.parametrize(
    ("kind", "text"),
    [("gpt2", "has no plan for models of type gpt2"), ("", "of type unknown"), ("qwen3_moe", "experts and joined")],
)
def test_a_model_without_a_plan_that_is_known_here_is_refused(kind, text):
    [found] = split_problems({"model_type": kind}, 2)
    assert text in found


def test_a_folder_that_cannot_be_read_is_left_to_the_trainer(tmp_path):
    assert folder_problems(tmp_path, 2) == []
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert len(folder_problems(tmp_path, 3)) == 3


def test_ranks_are_counted_by_copy():
    assert Ddp(ranks=4, tensor=2).ranks_per_copy == 2
    assert (Fsdp2(ranks=8, shard=4, tensor=2).ranks_per_copy, Fsdp2(ranks=8, shard=4, tensor=2).copies) == (4, 2)


@pytest.mark.parametrize(
    ("parallel", "texts"),
    [
        (
            {"kind": "ddp", "ranks": 3, "tensor": 2, "min_ranks": 2, "balance": "speed", "reference_gpus": "own"},
            ("ranks: 3 must be a multiple of tensor, 2", "min_ranks: needs tensor 1", "balance: ", "reference_gpus: "),
        ),
        ({"kind": "fsdp2", "ranks": 2, "tensor": 2}, ("tensor: 2 must divide shard, 2, and be less",)),
        ({"kind": "fsdp2", "ranks": 6, "shard": 3, "tensor": 2}, ("tensor: 2 must divide shard, 3",)),
        ({"kind": "none", "tensor": 2}, ("tensor",)),
    ],
)
def test_settings_of_ranks_that_do_not_go_together_are_refused_at_once(parallel, texts):
    with pytest.raises(ValidationError) as raised:
        SftSettings.model_validate({"parallel": parallel})
    for text in texts:
        assert text in str(raised.value)


def test_what_needs_whole_matrices_is_refused_at_once():
    with pytest.raises(ValidationError) as raised:
        SftSettings.model_validate(
            {
                "parallel": {"kind": "ddp", "ranks": 2, "tensor": 2},
                "lora": {},
                "optimizer": {"kind": "sgd"},
                "exchange": {"codec": "qsgd"},
                "passes": {"compile": True},
            }
        )
    for text in ("lora: needs", "exchange: needs parallel.tensor 1", "passes.compile: needs"):
        assert text in str(raised.value)
    with pytest.raises(ValidationError, match=r"muon needs whole matrices, parallel\.tensor 1"):
        SftSettings.model_validate(
            {"parallel": {"kind": "ddp", "ranks": 2, "tensor": 2}, "optimizer": {"kind": "muon"}}
        )
