"""Real, quick trainings: a very small model, an agent whose reward varies, and checks of the run's books."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulmen.algorithm.v1.training_run_pb2 import PolicySpec, TrainingRun
from fulmen.algorithm.v1.training_run_service_pb2 import CreateTrainingRunRequest
from fulmen.rpc.services import Services
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, Grader, PythonEntry
from fulmen.store.v1 import resource_service_pb2, rollout_service_pb2
from fulmen.store.v1.resource_pb2 import ResourceVersion

AGENT = b"""\
from openai import AsyncOpenAI

client = AsyncOpenAI()


async def solve(task):
    completion = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": task["input"]["question"]}]
    )
    return completion.choices[0].message.content or ""


def grade(task, outcome):
    return float(sum(map(ord, outcome)) % 2)
"""
BUILDER = b"""\
import make_model


def build(output_dir, seed=0):
    make_model.build(output_dir, seed, hidden=16, layers=1, heads=2, mlp=16)
"""
POLICY = "tiny"
BUILD = "tiny_model.py:build"


async def publish_training_inputs(
    client: Services,
    repository_root: Path,
    *,
    tasks: int = 8,
    validation: int = 4,
    builder: bytes = BUILDER,
    policy: str = POLICY,
    agent: bytes = AGENT,
) -> dict[str, str]:
    """Publishes an agent of a policy, bundle and data sets; returns the pinned versions by use."""
    make_model = (repository_root / "examples/arithmetic/make_model.py").read_bytes()
    asking = agent.replace(f'"{POLICY}"'.encode(), f'"{policy}"'.encode())
    files = {"agent.py": asking, "tiny_model.py": builder, "make_model.py": make_model}
    bundle = await _publish(client, "bundle.tiny", "bundle", _packed(files))
    spec = AgentSpec(
        bundle=bundle,
        python=PythonEntry(target="agent.py:solve"),
        grader=Grader(python=PythonEntry(target="agent.py:grade")),
    )
    lines = [json.dumps({"input": {"question": f"{i}+{i}="}}) for i in range(tasks + validation)]
    demonstration = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    return {
        "bundle": bundle,
        "agent": await _publish(client, "agent.tiny", "agent", spec.SerializeToString()),
        "train_tasks": await _publish(client, "dataset.tiny-train", "dataset", "\n".join(lines[:tasks]).encode()),
        "validation_tasks": await _publish(
            client, "dataset.tiny-validation", "dataset", "\n".join(lines[tasks:]).encode()
        ),
        "demonstrations": await _publish(
            client, "dataset.tiny-demonstrations", "dataset", json.dumps(demonstration).encode()
        ),
    }


async def create_run(
    client: Services,
    name: str,
    inputs: Mapping[str, str],
    settings: Mapping[str, object],
    *,
    policy: str = POLICY,
    algorithm: str = "grpo",
) -> str:
    """Creates a run of the published inputs; returns `projects/{project}/trainingRuns/{name}`."""
    run = TrainingRun(
        name=f"projects/default/trainingRuns/{name}",
        algorithm=algorithm,
        settings_json=json.dumps(settings),
        policy=PolicySpec(name=policy, build=BUILD),
        inputs={use: inputs[use] for use in ("agent", "train_tasks", "validation_tasks", "bundle")},
    )
    await client.training_runs.CreateTrainingRun(CreateTrainingRunRequest(training_run=run))
    return run.name


async def finished_groups(client: Services, training_run: str) -> list[str]:
    """Reads the ids of all finished groups of a run from the beginning of the feed, in its order."""
    stream = client.rollouts.WatchRollouts(rollout_service_pb2.WatchRolloutsRequest(training_run=training_run))
    found: list[str] = []
    try:
        async for message in stream:
            # The first empty message says that the feed is read to its end.
            if not message.groups:
                break
            found += [group.group_id for group in message.groups]
    finally:
        stream.cancel()
    return found


def read_consumed(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (newest_journal(run_folder) / "consumed.jsonl").read_text().splitlines()]


def newest_journal(run_folder: Path) -> Path:
    """Returns the folder in which the last owner of a run wrote."""
    return max(run_folder.glob("journal-*"))


def check_books(lines: Sequence[Mapping], feed: Sequence[str], *, steps: int) -> None:
    """Checks that every finished group was dealt with once, in order, up to the last one that was, in every branch.

    Args:
        lines: What the run has consumed.
        feed: Ids of the finished groups, in the order of the feed.
        steps: How many steps the run has.
    """
    groups = [line["group"] for line in lines]
    assert len(groups) == len(set(groups)), "a group was consumed twice"
    trained = [name for line in lines for name in line["trained"]]
    assert len(trained) == len(set(trained)), "a rollout was trained on twice"
    assert len(feed) == len(set(feed)), "a group was delivered twice"
    for branch in {line["branch"] for line in lines}:
        prefix = f"branch-{branch}/train/" if branch else "train/"
        delivered = [group_id for group_id in feed if group_id.startswith(prefix)]
        order = [f"{prefix}{line['group']}" for line in lines if line["branch"] == branch]
        assert order == delivered[: len(order)], "a finished group was skipped"
    assert sorted({line["step"] for line in lines}) == list(range(1, steps + 1))
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    for line in lines:
        assert bool(line["trained"]) == (line["outcome"] == "trained")


async def _publish(client: Services, resource: str, kind: str, content: bytes) -> str:
    version = ResourceVersion(name=f"resources/{resource}", kind=kind, content=content)
    answer = await client.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
    return answer.resources[0].name


def _packed(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
