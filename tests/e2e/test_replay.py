"""Stored rollouts are rescored under another reward and trained on, without new training rollouts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fulmen.scores import Scores, read_scores
from fulmen.store.v1 import resource_service_pb2, rollout_pb2
from fulmen.trajectories.stored import read_stored
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import StepSettings
from tests.support.algorithm.runs import list_rollouts
from tests.support.algorithm.training import AGENT, BUILDER
from tests.support.cli.commands import Done
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

PROMPTS, MEMBERS = 6, 8
COMMON = """\
[agent]
python = "agent.py:solve"
grader = "agent.py:grade"
"""
FIRST = f"""\
name = "rescored"
[policy]
name = "tiny"
build = "tiny_model.py:build"
{COMMON}
[data]
train = "train.jsonl"
[[stage]]
algorithm = "grpo"
steps = 1
prompts_per_step = {PROMPTS}
group_size = {MEMBERS}
max_staleness = 0
refill_limit = 0.0
max_tokens = 4
mask_truncated = false
"""
SECOND = f"""\
name = "replayed"
[policy]
name = "tiny"
{COMMON}
[data]
validation = "validation.jsonl"
scores = "scores.short"
[[stage]]
algorithm = "replay"
steps = 10
prompts_per_step = {PROMPTS}
learning_rate = 0.005
warmup_steps = 0
minibatches = 2
max_tokens = 4
mask_truncated = false
validate_every = 10
"""
B = """\
def grade(task, outcome):
    return -len(outcome)
"""


@pytest.fixture
def folder(tmp_path: Path, repository_root: Path) -> Path:
    """Makes the two trainings and the other grader."""
    made = tmp_path / "agent"
    made.mkdir()
    (made / "agent.py").write_bytes(AGENT)
    (made / "tiny_model.py").write_bytes(BUILDER)
    (made / "make_model.py").write_bytes((repository_root / "examples/arithmetic/make_model.py").read_bytes())
    lines = [json.dumps({"input": {"question": f"{i}+{i}="}}) + "\n" for i in range(PROMPTS + 2)]
    (made / "train.jsonl").write_text("".join(lines[:PROMPTS]))
    (made / "validation.jsonl").write_text("".join(lines[PROMPTS:]))
    (made / "first.toml").write_text(FIRST)
    (made / "second.toml").write_text(SECOND)
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.py").write_text(B)
    return made


@pytest.mark.long(short=True)
async def test_a_policy_learns_another_reward_from_stored_rollouts_alone(world, folder, tmp_path):
    first = _run_of(await world.fulmen("train", folder / "first.toml", "-o", "json"))
    before = await list_rollouts(world.client)
    rescored = await world.fulmen(
        "rollout", "rescore", "--grader", "b.py:grade", "--folder", tmp_path / "other", "--run", first["name"],
        "--name", "scores.short",
    )  # fmt: skip
    assert rescored.status == 0, rescored.stderr
    assert f"{PROMPTS * MEMBERS} of {PROMPTS * MEMBERS} rollouts scored." in rescored.stdout
    scores = await _scores(world)

    second = _run_of(await world.fulmen("train", folder / "second.toml", "-o", "json"))

    new = {each.name for each in await list_rollouts(world.client)} - {each.name for each in before}
    made = await list_rollouts(world.client, training_run=second["name"])
    assert new == {each.name for each in made}
    # Two tasks, validated at the beginning and at the end; nothing was sampled to train on.
    assert [each.mode for each in made] == [rollout_pb2.ROLLOUT_MODE_VALIDATION] * 4
    assert await _preference(world, scores, second["model_path"]) > await _preference(
        world, scores, first["model_path"]
    )

    out = tmp_path / "rows.jsonl"
    exported = await world.fulmen("rollout", "export", out, "--run", first["name"], "--scores", "scores.short@1")
    assert exported.status == 0, exported.stderr
    rewards = {each.rollout: each.final for each in scores.rollouts}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["rollout"]: row["final_rewards"]["reward"] for row in rows} == rewards


async def _scores(world: World) -> Scores:
    request = resource_service_pb2.GetResourcesRequest(names=["resources/scores.short"])
    return read_scores((await world.client.resources.GetResources(request)).resources[0].content)


def _run_of(done: Done) -> dict:
    assert done.status == 0, done.stdout + done.stderr
    return done.last_document["training_runs"][-1]


async def _preference(world: World, scores: Scores, model_path: str) -> float:
    """Returns by how much more likely a policy is to give an answer with one more unit of reward than its group's mean.

    That is the sum over the stored answers of advantage times log-probability: what training on them should raise.
    """
    groups: dict[str, list[float]] = {}
    for each in scores.rollouts:
        groups.setdefault(each.group, []).append(each.final or 0.0)
    finals = {each.rollout: (each.final or 0.0) - math.fsum(groups[each.group]) / len(groups[each.group])
              for each in scores.rollouts}  # fmt: skip
    rows: list[Row] = []
    for stored in await read_stored(world.client, sorted(finals)):
        assert stored.trajectory is not None
        [row] = stored.trajectory.rows
        rows.append(
            row_from_completion(
                rollout_id=stored.rollout.name,
                prompt_ids=row.prompt_ids,
                completion_ids=row.response_ids,
                logprobs=row.logprobs,
                advantage=finals[stored.rollout.name],
                version=0,
            )
        )
    policy = PolicyModel.load(Path(model_path), device="cpu")
    logprobs = logprobs_of(policy, rows, settings=StepSettings())
    return math.fsum(
        math.fsum(advantage * value for advantage, value in zip(row.advantages, each, strict=True))
        for row, each in zip(rows, logprobs, strict=True)
    )
