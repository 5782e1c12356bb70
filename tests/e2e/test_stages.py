"""The stages of a training belong to the algorithm service: they go on without the command that created them."""

from __future__ import annotations

import asyncio
import json
import signal
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


@pytest.fixture
def config(tmp_path: Path, repository_root: Path) -> Path:
    """Returns a train.toml of two stages."""
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
    return tmp_path / "train.toml"


async def test_the_second_stage_runs_although_the_command_was_killed_in_the_first(world, config):
    first, _ = await ended_in_first_stage(config, signal.SIGKILL, state_dir=world.state_dir)
    trained = f"projects/default/trainingRuns/{first}"
    evaluated = trained.replace("-1-sft", "-2-evaluate")

    async def ended() -> training_run_pb2.TrainingRun | None:
        assert (await read_run(world.client, trained)).state != training_run_pb2.TRAINING_RUN_STATE_FAILED
        run = await read_run(world.client, evaluated)
        return run if run.state in FINAL_RUN_STATES else None

    done = await eventually(ended, what="the second stage ends", deadline_s=240)
    assert done.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED, done.failure_message
    assert done.policy.version == (await read_run(world.client, trained)).policy_version
    assert done.results["validation_rollouts"] == 2
    # Whoever watches the first stage sees the others, too.
    watched = await world.fulmen("run", "watch", first)
    assert [line for line in watched.stdout.splitlines() if " ended: " in line] == [
        f"{trained} ended: succeeded",
        f"{evaluated} ended: succeeded",
    ]


async def test_who_detaches_is_told_how_to_stop_the_stages_and_can(world, config):
    config.write_text(TWO.replace("steps = 100", "steps = 1_000_000"))  # it does not end before it is stopped
    first, told = await ended_in_first_stage(config, signal.SIGINT, state_dir=world.state_dir)
    assert told == [
        f"Detached; the run continues. Watch it: fulmen run watch {first}   Stop it: fulmen run stop {first}",
        "The following stages start without this command.",
    ]
    second = first.replace("-1-sft", "-2-evaluate")
    listed = json.loads((await world.fulmen("run", "list", "--limit", "2", "-o", "json")).stdout)
    assert [each["name"].rpartition("/")[2] for each in listed] == [second, first]
    assert [each["state"] for each in listed] == ["TRAINING_RUN_STATE_PENDING", "TRAINING_RUN_STATE_RUNNING"]
    assert "pending, waits for a stage" in (await world.fulmen("run", "list", "--limit", "1")).stdout
    shown = (await world.fulmen("run", "show", second)).stdout
    assert f"The run waits for the stage before it, projects/default/trainingRuns/{first}." in shown
    assert f"{first}, {second}" in shown
    stopped = await world.fulmen("run", "stop", second)
    assert stopped.stdout.strip() == f"projects/default/trainingRuns/{first}: cancelled", stopped.stderr
    watched = await world.fulmen("run", "watch", second)
    assert watched.stdout.splitlines()[-1] == f"projects/default/trainingRuns/{second} ended: cancelled"


async def ended_in_first_stage(config: Path, signal_number: int, *, state_dir: Path) -> tuple[str, list[str]]:
    """Ends `fulmen train` with a signal once its first stage has begun; returns its run's id, and what it says after that."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulmen_cli", "train", str(config), "--state-dir", str(state_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    run, is_sent = "", False
    said: list[str] = []
    try:
        async with asyncio.timeout(120):
            async for line in process.stdout:
                text = line.decode().rstrip()
                if text.startswith("sft: run "):
                    run = text.removeprefix("sft: run ")
                elif text.startswith("sft: step") and not is_sent:
                    process.send_signal(signal_number)
                    is_sent = True
                elif is_sent and not text.startswith("sft: "):
                    said.append(text)
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return run, said
