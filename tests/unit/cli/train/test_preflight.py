"""`fulmen train --check` shows what each stage takes and chooses before anything is created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fulmen_cli.main import app
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


def checked(folder: Path, source: str, stages: str, *more: str, fails: bool = False) -> str:
    text = f'name = "tool"\n[policy]\nname = "tool"\n{source}\n[agent]\npython = "agent.py:solve"\n'
    (folder / "train.toml").write_text(f'{text}[data]\ntrain = "tasks.jsonl"\n{stages}')
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
        assert f"settings.parallel: tensor: {name} in the model's configuration, is no multiple of 3" in refused


def test_a_stage_that_seldom_works_is_doubted(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + "learning_rate = 5e-4\n")
    assert "stage 1 (grpo): Warning: learning_rate is 0.0005, 500 times the default" in shown


def test_programs_get_the_same(folder: Path) -> None:
    shown = checked(folder, f'path = "{folder}/qwen"', GRPO + "max_tokens = 16\n", "-o", "json")
    document: dict[str, Any] = json.loads(shown)
    [stage] = document["stages"]
    assert stage["parameters"] == 596_049_920
    assert {"weights", "gradients", "activations"} <= {part["name"] for part in stage["memory"]}
    assert any("seldom answers so shortly" in doubt for doubt in stage["doubts"])


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
