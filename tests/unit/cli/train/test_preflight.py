"""`fulmen train --check` shows what each stage takes and chooses before anything is created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fulmen_cli.main import app
from tests.support.algorithm.models import small_model
from tests.support.cli.command_runner import CliRunner

NOBODY = {
    **dict.fromkeys(("FULMEN_STORE_TARGET", "FULMEN_ALGORITHM_TARGET", "FULMEN_LLM_PROXY_TARGET")),
    "COLUMNS": "200",
}
QWEN3_0_6B = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder of an agent, its tasks, and the configuration of a model."""
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen/config.json").write_text(json.dumps(QWEN3_0_6B))
    (tmp_path / "agent.py").write_text("def solve(task): return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"input": "hello"}\n')
    return tmp_path


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a model with weights and tokenizer."""
    return small_model(tmp_path_factory.mktemp("tiny"), hidden=16, layers=1)


def checked(
    folder: Path, source: str, stages: str, *more: str, fails: bool = False, data: str = 'train = "tasks.jsonl"'
) -> str:
    text = f'name = "tool"\n[policy]\nname = "tool"\n{source}\n[agent]\npython = "agent.py:solve"\n'
    (folder / "train.toml").write_text(f"{text}[data]\n{data}\n{stages}")
    words = ["train", str(folder / "train.toml"), "--check", "--state-dir", str(folder / "none"), *more]
    done = CliRunner().invoke(app, words, env=NOBODY)
    assert (done.exit_code != 0) is fails, done.output
    return done.output if fails else done.stdout


GRPO = '[[stage]]\nalgorithm = "grpo"\nengine = { kind = "vllm" }\n'


def test_a_stage_shows_its_batch_memory_and_what_it_chooses_by_the_model(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + "group_size = 4\n")
    assert "A step has 128 rollouts (32 tasks, 4 of each), with answers of up to 1024 tokens" in shown
    assert "Trainer on a GPU: 28.9 GiB (weights 2.2, gradients 2.2," in shown
    assert "learning_rate is 1e-06: the default for 596 M parameters." in shown
    assert "Versions are published in bfloat16" in shown
    assert "Warning" not in shown
    assert "Nothing was published." in shown


def test_split_matrices_are_in_the_memory_and_those_that_cannot_be_split_are_refused(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + 'parallel = { kind = "ddp", ranks = 2, tensor = 2 }\n')
    assert "(weights 1.4, gradients 1.4," in shown
    stage = GRPO + 'parallel = { kind = "ddp", ranks = 3, tensor = 3 }\n'
    refused = checked(folder, f'path = "{folder}/qwen"', stage, fails=True)
    for name in ("num_attention_heads, 16", "num_key_value_heads, 8"):
        assert f"settings.parallel: tensor: {name} in the model's configuration, is not a multiple of 3" in refused


def test_split_rows_are_in_the_memory(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + 'parallel = { kind = "ddp", ranks = 2, context = 2 }\n')
    whole = checked(folder, f'path = "{folder}/qwen"', GRPO)
    assert activations(shown) < activations(whole)


def activations(shown: str) -> float:
    return float(shown.partition("activations ")[2].partition(",")[0])


def test_a_stage_shows_packing_head_and_engine_and_that_no_time_is_known(folder: Path) -> None:
    engine = 'engine = { kind = "vllm", max_model_len = 4096, max_sequences = 32, tensor_parallel = 2 }\n'
    shown = checked(folder, f'path = "{folder}/qwen"', f'[[stage]]\nalgorithm = "grpo"\n{engine}')
    assert (
        "Packing: rows share lines in micro-batches of up to 8192 positions; the share of padding is known after"
        in shown
    )
    # 2^25 / 151936 positions; 12 bytes for each of 8192 * 151936 logits.
    assert "Head: cross entropy in pieces of 220 positions" in shown
    assert "0.4 GiB instead of 13.9 GiB." in shown
    # 2 bytes of 596 M parameters on two GPUs; 2 * 28 layers * 8 heads * 128 * 2 bytes of 32 * 4096 tokens on two.
    assert "Engine on a GPU: 8.6 GiB (engine's weights 0.6, engine's cache 7.0, engine's libraries 1.0)" in shown
    assert "32 calls of 4096 tokens (max_sequences, max_model_len). vLLM takes 50% of each GPU" in shown
    assert "Expected time: not known: no stack is running, and no service is named." in shown


def test_a_model_that_changes_its_logits_keeps_all_of_them(folder: Path) -> None:
    (folder / "qwen/config.json").write_text(json.dumps({**QWEN3_0_6B, "final_logit_softcapping": 30.0}))
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO)
    assert "Head: final_logit_softcapping changes the logits of this model" in shown
    assert "the logits of a whole micro-batch are kept: 13.9 GiB" in shown
    assert "logits 13.9" in shown


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        # Two moments of tables of tokens and of norms.
        ('kind = "muon"', 596_049_920 + 151_936 * 1024 + 28 * (2 * 1024 + 2 * 128) + 1024),
        ('kind = "sgd"', 0),
        ('kind = "sgd", momentum = 0.9', 596_049_920),
    ],
)
def test_the_memory_of_the_optimiser_is_that_of_its_settings(folder: Path, optimizer: str, numbers: int) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + f"optimizer = {{ {optimizer} }}\n", "-o", "json")
    [stage] = json.loads(shown)["stages"]
    memory = {part["name"]: part["size_bytes"] for part in stage["memory"]}
    assert memory["optimiser"] == 4 * numbers


def test_the_padding_of_demonstrations_is_computed_as_the_trainer_packs_them(folder: Path, tiny_model: Path) -> None:
    talks = ["1+1=", "1234+5678=", "12+3="]
    lines = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "2" * n}]}
        for n, text in enumerate(talks, start=1)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = checked(
        folder,
        f'path = "{tiny_model}"',
        '[[stage]]\nalgorithm = "sft"\nbatch_size = 3\n',
        data='demonstrations = "talks.jsonl"',
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sizes = [len(tokenizer.apply_chat_template(line["messages"], return_dict=False)) for line in lines]
    # Three rows that do not fit on one line of the longest: a line for each that is left.
    lines_needed = 3 if sum(sorted(sizes)[:2]) > max(sizes) else 2
    padding = 1 - sum(sizes) / (lines_needed * max(sizes))
    assert f"{padding:.1%} of them padding (computed from the first batches)" in shown


def test_a_stage_that_seldom_works_is_doubted(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + "learning_rate = 5e-4\n")
    assert "stage 1 (grpo): Warning: learning_rate is 0.0005, 500 times the default" in shown


def test_programs_get_the_same(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + "max_tokens = 16\n", "-o", "json")
    document: dict[str, Any] = json.loads(shown)
    [stage] = document["stages"]
    assert stage["parameters"] == 596_049_920
    assert {"weights", "gradients", "activations"} <= {part["name"] for part in stage["memory"]}
    assert any("are seldom this short" in doubt for doubt in stage["doubts"])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ('build = "agent.py:solve"', "known once agent.py:solve has built it"),
        ('base = "model:tiny"', "known when the run begins"),
        ('path = "."', "cannot be read"),
    ],
)
def test_a_model_that_is_not_known_yet_is_no_reason_to_refuse(folder: Path, source: str, told: str) -> None:
    assert told in checked(folder, source, GRPO)
