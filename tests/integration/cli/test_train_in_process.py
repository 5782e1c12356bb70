"""`fulmen train --in-process`: a whole training in one process, and a breakpoint on its way."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.cli.terminal import terminal_program

AGENT = """
from openai import AsyncOpenAI

client = AsyncOpenAI()
seen = []


async def solve(task):
    if not seen:
        seen.append(task)
        breakpoint()
    turns = [{"role": "user", "content": task["input"]["question"]}]
    answer = await client.chat.completions.create(model="tiny", messages=turns)
    return answer.choices[0].message.content or ""


def grade(task, outcome):
    return float(sum(map(ord, outcome)) % 2)
"""
BUILDER = """
import make_model


def build(output_dir, seed=0):
    make_model.build(output_dir, seed, hidden=16, layers=1, heads=2, mlp=16)
"""
CONFIG = """
name = "tiny"
[policy]
name = "tiny"
build = "tiny_model.py:build"
[agent]
python = "agent.py:solve"
grader = "agent.py:grade"
isolation = "process"
[data]
train = "train.jsonl"
validation = "train.jsonl"
[[stage]]
algorithm = "grpo"
steps = 2
prompts_per_step = 2
group_size = 2
minibatches = 1
max_tokens = 3
refill_limit = 0
mask_truncated = false
validate_every = 2
"""


@pytest.fixture
def folder(short_tmp_path: Path, repository_root: Path) -> Path:
    shutil.copy(repository_root / "examples/arithmetic/make_model.py", short_tmp_path)
    (short_tmp_path / "agent.py").write_text(AGENT)
    (short_tmp_path / "tiny_model.py").write_text(BUILDER)
    (short_tmp_path / "train.jsonl").write_text('{"input": {"question": "1+1="}}\n{"input": {"question": "2+1="}}\n')
    (short_tmp_path / "train.toml").write_text(CONFIG)
    return short_tmp_path


@pytest.mark.long(short=True)
@pytest.mark.serial
def test_a_training_in_one_process_stops_at_a_breakpoint_and_ends_with_a_model(folder: Path) -> None:
    command = [sys.executable, "-m", "fulmen_cli", "train", "train.toml", "--in-process"]
    with terminal_program(command, folder=folder) as program:
        program.read_until("(Pdb)", timeout_s=90)
        # The main thread of the process that holds the store, too; and the model can be asked from the prompt.
        program.write(
            "import threading, sys; print(threading.current_thread().name, 'fulmen_store.app' in sys.modules)\n"
        )
        assert "MainThread True" in program.read_until("(Pdb)")
        program.write("continue\n")
        shown = program.read_until("validation accuracy", timeout_s=90)
        assert program.exit_status() == 0

    assert "trained model" in shown
    # What services log is for their file, the audit log of administrative calls too.
    assert '{"event"' not in shown
    assert '{"event":"audit"' in (folder / ".fulmen/in-process/logs/services.log").read_text()
    assert (folder / ".fulmen/reports/in-process/report.md").is_file()
