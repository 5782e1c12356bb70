"""The stages of a training belong to the algorithm service: they go on without the command that created them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2
from tests.support.algorithm.runs import FINAL_RUN_STATES, eventually, read_run
from tests.support.algorithm.training import AGENT, BUILDER

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

TWO = """\
name = "closed-laptop"
[policy]
name = "tiny"
build = "tiny_model.py:build"
[agent]
python = "agent.py:solve"
grader = "agent.py:grade"
[data]
validation = "tasks.jsonl"
demonstrations = "demonstrations.jsonl"
[[stage]]
algorithm = "sft"
steps = 100
report_every = 1
warmup_steps = 0
[[stage]]
algorithm = "evaluate"
samples = 2
"""


async def test_the_second_stage_runs_although_the_command_was_killed_in_the_first(world, tmp_path, repository_root):
    demonstration = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    files = {
        "agent.py": AGENT,
        "tiny_model.py": BUILDER,
        "make_model.py": (repository_root / "examples/arithmetic/make_model.py").read_bytes(),
        "tasks.jsonl": b'{"input": {"question": "1+2="}}\n',
        "demonstrations.jsonl": json.dumps(demonstration).encode(),
        "train.toml": TWO.encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    first = await killed_in_first_stage(tmp_path / "train.toml", state_dir=world.state_dir)
    trained = f"projects/default/trainingRuns/{first}"
    evaluated = trained.replace("-1-sft", "-2-evaluate")
    assert (await read_run(world.client, trained)).state not in FINAL_RUN_STATES, "the command was killed too late"

    async def ended() -> training_run_pb2.TrainingRun | None:
        assert (await read_run(world.client, trained)).state != training_run_pb2.TRAINING_RUN_STATE_FAILED
        run = await read_run(world.client, evaluated)
        return run if run.state in FINAL_RUN_STATES else None

    done = await eventually(ended, what="the second stage ends", deadline_s=240)
    assert done.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED, done.failure_message
    assert done.policy.version == (await read_run(world.client, trained)).policy_version
    assert done.results["validation_rollouts"] == 2


async def killed_in_first_stage(config: Path, *, state_dir: Path) -> str:
    """Kills `fulmen train` with signal 9 once its first stage has begun; returns the id of that stage's run."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulmen_cli", "train", str(config), "--state-dir", str(state_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    run = ""
    try:
        async with asyncio.timeout(120):
            async for line in process.stdout:
                text = line.decode()
                if text.startswith("sft: run "):
                    run = text.removeprefix("sft: run ").strip()
                if text.startswith("sft: step"):
                    break
    finally:
        process.kill()
        await process.wait()
    assert run
    return run
