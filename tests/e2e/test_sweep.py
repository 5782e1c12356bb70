"""A sweep over settings of a training on preferences is killed, goes on, and ends with a table of its trials."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.training.following import follow_run
from tests.support.algorithm.training import BUILDER
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

TRAIN = """\
name = "preferring"
[policy]
name = "preferring"
build = "tiny_model.py:build"
[data]
preferences = "pairs.jsonl"
[[stage]]
algorithm = "dpo"
warmup_steps = 0
report_every = 1
batch_size = 8
held_out = 0.2
"""
SWEEP = """\
name = "rates"
train = "train.toml"
trials = 2
[steps]
setting = "dpo.steps"
min = 2
max = 4
factor = 2
[search]
"dpo.learning_rate" = [1e-9, 2e-2]
"""
RUNS = "projects/default/trainingRuns/"


@pytest.fixture
def config(tmp_path: Path, repository_root: Path) -> Path:
    """Returns a sweep.toml over a train.toml that prefers short answers."""
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"{n % 10}+{n // 10}="}],
            "chosen": [{"role": "assistant", "content": str(n % 10 + n // 10)}],
            "rejected": [{"role": "assistant", "content": f"{n % 10 + n // 10}" * 3}],
        }
        for n in range(20)
    ]
    files = {
        "tiny_model.py": BUILDER,
        "make_model.py": (repository_root / "examples/arithmetic/make_model.py").read_bytes(),
        "pairs.jsonl": "".join(json.dumps(each) + "\n" for each in pairs).encode(),
        "train.toml": TRAIN.encode(),
        "sweep.toml": SWEEP.encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path / "sweep.toml"


async def test_a_sweep_that_was_killed_goes_on_with_the_runs_that_it_has(world: World, config: Path):
    config.write_text(SWEEP.replace("1e-9", "2"))
    for options in ((), ("--check",)):
        wrong = await world.fulmen("sweep", config, *options)
        assert wrong.status == 2
        assert "stage 1 (dpo): settings.learning_rate" in wrong.stderr
    assert not await runs_of(world)

    config.write_text(SWEEP)
    await killed_after_the_first_run(config, world.state_dir)
    first = await runs_of(world)
    assert 1 <= len(first) <= 2
    done = await world.fulmen("sweep", config, "-o", "json")
    assert done.status == 0, done.stderr
    results = json.loads(done.stdout)
    assert sorted(each["trial"] for each in results) == [0, 1]
    assert [each["steps"] for each in results] == [4, 2]
    assert results[0]["settings"]["dpo.learning_rate"] == 2e-2
    assert results[0]["value"] > results[-1]["value"] - 1e-9
    runs = await runs_of(world)
    # The one that is left went on: both trained two steps, and it two more.
    assert sorted(run.step for run in runs) == [2, 4]
    assert [await steps_trained(world, run.name) for run in runs] == [list(range(1, run.step + 1)) for run in runs]
    out = [run for run in runs if run.step == 2]
    assert {run.state for run in out} == {training_run_pb2.TRAINING_RUN_STATE_CANCELLED}
    # Those that the killed command had created are among them, each once.
    assert {run.name: run.create_time.ToNanoseconds() for run in first}.items() <= {
        run.name: run.create_time.ToNanoseconds() for run in runs
    }.items()
    assert {"sweep.rates", f"trial.{results[0]['trial']}"} <= set(
        next(run.tags for run in runs if run.name == results[0]["run"])
    )
    # A third time there is nothing left to do but to show the table.
    shown = await world.fulmen("sweep", config)
    assert "The best: dpo.learning_rate = " in shown.stdout
    assert [run.step for run in await runs_of(world)] == [run.step for run in runs]

    config.with_name("train.toml").write_text(TRAIN.replace("batch_size = 8", "batch_size = 4"))
    other = await world.fulmen("sweep", config)
    assert other.status == 2
    assert "with other settings, data or agent; choose another name" in other.stderr


async def runs_of(world: World) -> list[training_run_pb2.TrainingRun]:
    request = training_run_service_pb2.ListTrainingRunsRequest(project="projects/default", page_size=100)
    answer = await world.client.training_runs.ListTrainingRuns(request)
    return [run for run in answer.training_runs if run.name.startswith(f"{RUNS}rates-")]


async def steps_trained(world: World, run: str) -> list[int]:
    """Returns the steps that a run reported, repetitions included."""
    events = follow_run(world.client, run, on_interruption=lambda _: None)
    return [event.step.step async for event in events if event.HasField("step") and event.step.step]


async def killed_after_the_first_run(config: Path, state_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulmen_cli", "sweep", str(config), "--state-dir", str(state_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(240):
            async for line in process.stdout:
                if line.startswith(b"trial 0, 2 steps"):
                    break
            else:
                raise AssertionError("the command ended before it had created a run")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
