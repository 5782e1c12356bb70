"""Ranks of real runs exchange compressed gradients: among themselves, and through the shards of a service."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

STEPS = 3
CONFIG = """\
name = "compressed"
[policy]
name = "compressed"
build = "make_model.py:build"
[agent]
python = "agent.py:solve"
grader = "grader.py:grade"
[data]
train = "tasks/train.jsonl"
demonstrations = "tasks/demonstrations.jsonl"
[[stage]]
algorithm = "sft"
steps = {steps}
warmup_steps = 0
report_every = 1
learning_rate = 0.1
optimizer = {{ kind = "sgd" }}
parallel = {{ kind = "ddp", ranks = 4 }}
exchange = {{ codec = "dgc", ratio = 100, check_every = 1, policy = {{ kind = "fixed", warmup_rounds = 0 }} }}
[[stage]]
algorithm = "sft"
steps = {steps}
warmup_steps = 0
report_every = 1
parallel = {{ kind = "ddp", ranks = 2 }}
exchange = {{ codec = "qsgd", check_every = 1, link = {{ kind = "grpc", targets = ["{target}", "{target}"] }} }}
"""


async def events_of(world: World, run: str) -> list[pb.TrainingRunEvent]:
    """Reads the history of a run that has ended."""
    watched = world.client.training_runs.WatchTrainingRun(service_pb.WatchTrainingRunRequest(name=run))
    return [answer.event async for answer in watched]


@pytest.mark.long(short=True)
async def test_a_run_is_trained_through_codecs_by_four_ranks_and_by_two_over_grpc(
    world: World, world_folder: Path, repository_root: Path
) -> None:
    target = f"127.0.0.1:{world.stack.targets['algorithm'].rpartition(':')[2]}"
    folder = world_folder / "compressed"
    shutil.copytree(repository_root / "examples/arithmetic", folder)
    (folder / "train.toml").write_text(CONFIG.format(steps=STEPS, target=target))
    done = await world.fulmen("train", folder / "train.toml", "--output", "json")
    assert done.status == 0, done.stdout + done.stderr
    among, over = [run["name"] for run in done.last_document["training_runs"]]
    for run, at_least in ((among, 4.0), (over, 2.0)):
        steps = [dict(event.step.values) for event in await events_of(world, run) if event.step.step]
        assert len(steps) == STEPS
        for figures in steps:
            assert figures["exchange_ratio"] > at_least
            assert figures["exchange_sent_bytes"] > 0
            assert figures["exchange_missed_sums"] == 0
            assert figures["spent_exchange_seconds"] > 0
            assert figures["spent_train_seconds"] > 0
