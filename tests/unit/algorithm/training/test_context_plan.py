"""What context parallelism does not go with is refused by the settings and by the model's configuration, all at once."""

import json

import pytest
from pydantic import ValidationError

from fulmen_algorithm.algorithms.sft import SftSettings
from fulmen_algorithm.training.compute import Ddp, Fsdp2
from fulmen_algorithm.training.context_plan import context_folder_problems, context_problems

QWEN = {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "rope_scaling": None}


def test_a_model_whose_positions_meet_in_attention_alone_is_split():
    assert context_problems(QWEN) == []
    assert context_problems({"model_type": "any", "text_config": QWEN}) == []
    assert context_problems({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}) == []


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention", "conv"], "rope_scaling": {"type": "dynamic"}},
            ["layers of kind conv, which", "layers of kind linear_attention, which", "of type dynamic"],
        ),
        ({"conv_kernel": 4}, ["has conv_kernel"]),
        ({"text_config": {"mamba_d_conv": 4}}, ["has mamba_d_conv"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, ["of type longrope"]),
    ],
)
def test_everything_that_keeps_rows_whole_is_named(config, texts):
    found = context_problems(config)
    assert len(found) == len(texts)
    for problem, text in zip(found, texts, strict=True):
        assert problem.startswith("context: the model")
        assert text in problem


def test_a_folder_that_cannot_be_read_is_left_to_the_trainer(tmp_path):
    assert context_folder_problems(tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps({"conv_kernel": 4}))
    assert len(context_folder_problems(tmp_path)) == 1


def test_a_copy_is_what_it_was_without_context():
    assert Ddp(ranks=4, context=2).ranks_per_copy == 1
    assert (Fsdp2(ranks=8, shard=4, context=2).ranks_per_copy, Fsdp2(ranks=8, shard=4, context=4).copies) == (4, 2)


@pytest.mark.parametrize(
    ("parallel", "texts"),
    [
        (
            {"kind": "ddp", "ranks": 3, "context": 2, "min_ranks": 2, "balance": "speed", "reference_gpus": "own"},
            (
                "ranks: 3 must be a multiple of context, 2",
                "min_ranks: needs context 1",
                "balance: ",
                "reference_gpus: ",
            ),
        ),
        ({"kind": "ddp", "ranks": 4, "tensor": 2, "context": 2}, ("tensor: needs context 1",)),
        ({"kind": "fsdp2", "ranks": 6, "shard": 3, "context": 2}, ("context: 2 must divide shard, 3",)),
        ({"kind": "none", "context": 2}, ("context",)),
    ],
)
def test_settings_of_ranks_that_do_not_go_together_are_refused_at_once(parallel, texts):
    with pytest.raises(ValidationError) as raised:
        SftSettings.model_validate({"parallel": parallel})
    for text in texts:
        assert text in str(raised.value)


def test_what_needs_whole_rows_is_refused_at_once():
    with pytest.raises(ValidationError) as raised:
        SftSettings.model_validate(
            {
                "parallel": {"kind": "ddp", "ranks": 2, "context": 2},
                "exchange": {"codec": "qsgd"},
                "passes": {"compile": True, "attention": "flex_attention"},
            }
        )
    for text in (
        "exchange: needs parallel.context 1",
        "passes.compile: needs",
        "flex_attention needs parallel.context 1",
    ):
        assert text in str(raised.value)


def test_adapters_and_every_optimiser_go_with_split_rows():
    for more in ({"lora": {}}, {"optimizer": {"kind": "muon"}}, {"gradient_checkpointing": True}):
        SftSettings.model_validate({"parallel": {"kind": "ddp", "ranks": 2, "context": 2}, **more})
