"""Bad input against a running stack: one clear error each, all problems at once, and nothing is created."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fulmen.algorithm.v1 import training_run_service_pb2
from fulmen.errors import ResourceNotFound, TokenInvalid
from fulmen.rpc.services import connect
from fulmen.store.v1 import resource_service_pb2, rollout_pb2, rollout_service_pb2
from tests.support.algorithm.runs import list_rollouts
from tests.support.end_to_end import World
from tests.support.stack import stack_targets

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

USAGE = 2
NAME = "bad-input"


@pytest.fixture
def example(repository_root: Path, tmp_path: Path) -> Path:
    """Returns a copy of the arithmetic example under another name, to be broken."""
    folder = shutil.copytree(repository_root / "examples/arithmetic", tmp_path / "example")
    file = folder / "train.toml"
    text = file.read_text(encoding="utf-8").replace('name = "arithmetic"', f'name = "{NAME}"')
    file.write_text(text, encoding="utf-8")
    return folder


@asynccontextmanager
async def nothing_is_created(world: World) -> AsyncIterator[None]:
    """Checks that rollouts, training runs and the resources of `NAME` are the same afterwards."""
    before = await listing(world)
    yield
    assert await listing(world) == before


async def listing(world: World) -> dict[str, list[str]]:
    runs = await world.client.training_runs.ListTrainingRuns(
        training_run_service_pb2.ListTrainingRunsRequest(page_size=1000)
    )
    resources = [f"agent.{NAME}", f"bundle.{NAME}", f"dataset.{NAME}.train_tasks", f"policy.{NAME}"]
    return {
        "rollouts": [rollout.name for rollout in await list_rollouts(world.client)],
        "runs": [run.name for run in runs.training_runs],
        **{resource: await versions(world, resource) for resource in resources},
    }


async def versions(world: World, resource: str) -> list[str]:
    request = resource_service_pb2.ListResourceVersionsRequest(parent=f"resources/{resource}", page_size=1000)
    try:
        answer = await world.client.resources.ListResourceVersions(request)
    except ResourceNotFound:
        return []
    return [each.name for each in answer.resources]


def with_malformed_lines(folder: Path) -> list[str]:
    spoil(folder / "tasks/train.jsonl", {3: "{not json", 7: '["a list"]'})
    spoil(folder / "tasks/demonstrations.jsonl", {2: '{"messages": []}'})
    return []


def with_unknown_keys(folder: Path) -> list[str]:
    file = folder / "train.toml"
    file.write_text('nmae = "x"\n' + file.read_text(encoding="utf-8").replace("grader =", "gradr ="), encoding="utf-8")
    return []


def with_unknown_settings(folder: Path) -> list[str]:
    return ["--set", "grpo.stepz=3", "--set", "sft.lerning_rate=1", "--set", "grpo.steps=-1"]


@pytest.mark.parametrize(
    ("broken", "problems"),
    [
        (
            with_malformed_lines,
            ("nothing was created", "tasks/train.jsonl:3: ", "tasks/train.jsonl:7: ", "tasks/demonstrations.jsonl:2: "),
        ),
        (with_unknown_keys, ("nmae: no such key", "agent.gradr: no such key; did you mean 'grader'?")),
        (with_unknown_settings, ("stepz", "lerning_rate", "settings.steps")),
    ],
)
async def test_everything_that_is_wrong_with_a_training_is_reported_at_once(world, example, broken, problems):
    words = broken(example)
    async with nothing_is_created(world):
        done = await world.fulmen("train", example / "train.toml", *words)

    assert done.status == USAGE
    assert all(done.stderr.count(problem) == 1 for problem in problems), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


async def test_a_wrong_key_is_refused_everywhere(world, example):
    targets = stack_targets(world.stack)
    async with nothing_is_created(world):
        done = await world.fulmen("train", example / "train.toml", "--token", "not.a.token")
        assert done.status == 1
        assert done.stderr.startswith("error: The token is malformed or was not issued by this deployment.\n")
        assert "Traceback" not in done.stdout + done.stderr

        async with connect(targets, token="not.a.token") as stranger:
            with pytest.raises(TokenInvalid):
                await stranger.rollouts.BatchCreateRollouts(
                    rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=b"{}")])
                )
            with pytest.raises(TokenInvalid):
                await stranger.training_runs.ListTrainingRuns(training_run_service_pb2.ListTrainingRunsRequest())

        async with grpc.aio.insecure_channel(targets.store) as channel:
            exporter = trace_service_pb2_grpc.TraceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await exporter.Export(trace_service_pb2.ExportTraceServiceRequest(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

        status, body = await ask_model(world, key="not.a.token", content=b"1+1=")
        assert status == 401
        assert body["error"]["message"]


async def ask_model(world: World, *, key: str, content: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    """Sends a chat completion to the proxy; returns status and answer."""
    url = f"{world.stack.targets['llm_proxy_http']}/v1/chat/completions"
    body = b'{"model": "none", "messages": [{"role": "user", "content": "%s"}]}' % content
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


def spoil(path: Path, lines: dict[int, str]) -> None:
    """Replaces lines of a file, by number from 1."""
    kept = path.read_text(encoding="utf-8").splitlines()
    for number, text in lines.items():
        kept[number - 1] = text
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
