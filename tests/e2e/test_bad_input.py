"""Bad input against a running stack: one clear error each, all problems at once, and nothing is created."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import ArgumentInvalid, MessageTooLarge, ResourceNotFound, SettingsInvalid, TokenInvalid
from fulmen.rpc.services import connect
from fulmen.store.v1 import resource_service_pb2, rollout_pb2, rollout_service_pb2
from tests.support.algorithm.runs import list_rollouts
from tests.support.cli.commands import run_module
from tests.support.end_to_end import World
from tests.support.stack import stack_targets

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

USAGE = 2
TOO_LARGE_FOR_A_MESSAGE = 21 * 1024 * 1024
TOO_LARGE_FOR_A_TASK = 256 * 1024 + 1
TOO_LARGE_FOR_THE_PROXY = 33 * 1024 * 1024
NAME = "bad-input"
LIMIT_S = 60.0


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


async def test_every_malformed_line_of_every_file_is_reported_at_once(world, example):
    spoil(example / "tasks/train.jsonl", {3: "{not json", 7: '["a list"]'})
    spoil(example / "tasks/demonstrations.jsonl", {2: '{"messages": []}'})

    async with nothing_is_created(world):
        done = await world.fulmen("train", example / "train.toml")

    assert done.status == USAGE
    assert done.stderr.startswith("error: The data files have 3 problems; nothing was created.")
    for place in ("tasks/train.jsonl:3: ", "tasks/train.jsonl:7: ", "tasks/demonstrations.jsonl:2: "):
        assert done.stderr.count(place) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


async def test_unknown_keys_of_a_train_file_are_reported_at_once(world, example):
    file = example / "train.toml"
    file.write_text('nmae = "x"\n' + file.read_text(encoding="utf-8").replace("grader =", "gradr ="), encoding="utf-8")

    async with nothing_is_created(world):
        done = await world.fulmen("train", file)

    assert done.status == USAGE
    assert "nmae: no such key; did you mean 'name'?" in done.stderr
    assert "agent.gradr: no such key; did you mean 'grader'?" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


async def test_unknown_settings_of_every_stage_are_reported_at_once(world, example):
    async with nothing_is_created(world):
        done = await world.fulmen(
            "train",
            example / "train.toml",
            "--set",
            "grpo.stepz=3",
            "--set",
            "sft.lerning_rate=1",
            "--set",
            "grpo.steps=-1",
        )

    assert done.status == USAGE
    for setting in ("stepz", "lerning_rate", "steps"):
        assert setting in done.stderr, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


async def test_the_rollouts_of_a_run_that_does_not_exist_are_refused_before_a_run_does(world):
    run = training_run_pb2.TrainingRun(
        algorithm="sft",
        policy=training_run_pb2.PolicySpec(name=NAME, path="/nowhere"),
        inputs={"rollouts": "projects/default/trainingRuns/nobody-1"},
    )
    async with nothing_is_created(world):
        with pytest.raises(SettingsInvalid) as refused:
            await world.client.training_runs.CreateTrainingRun(
                training_run_service_pb2.CreateTrainingRunRequest(training_run=run)
            )
    (violation,) = refused.value.violations
    assert (violation.field, "no training run projects/default/trainingRuns/nobody-1" in violation.description) == (
        "inputs.rollouts",
        True,
    )


async def test_a_wrong_key_is_refused_everywhere(world, example):
    targets = stack_targets(world.stack)
    async with nothing_is_created(world):
        done = await world.fulmen("train", example / "train.toml", "--token", "not.a.token")
        assert done.status == 1
        assert done.stderr.startswith("error: The token is malformed or was not made by this deployment.\n")
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


async def test_what_is_too_large_is_refused_with_the_limit_named(world):
    async with nothing_is_created(world):
        whole = rollout_pb2.Rollout(input=b" " * TOO_LARGE_FOR_A_MESSAGE)
        with pytest.raises(MessageTooLarge):
            await world.client.rollouts.BatchCreateRollouts(
                rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[whole])
            )

        task = rollout_pb2.Rollout(input=b" " * TOO_LARGE_FOR_A_TASK)
        with pytest.raises(ArgumentInvalid) as refused:
            await world.client.rollouts.BatchCreateRollouts(
                rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=b"{}"), task])
            )
        assert [violation.field for violation in refused.value.violations] == ["rollouts[1].input"]

        assert await announce_body(world, TOO_LARGE_FOR_THE_PROXY) == 413


@pytest.mark.parametrize(
    ("module", "kind", "port"),
    [
        ("fulmen_store", "store", "store"),
        ("fulmen_runner", "runner", "runner-1"),
        ("fulmen_llm_proxy", "llm_proxy", "llm_proxy"),
    ],
)
async def test_a_service_with_a_taken_port_or_an_unknown_setting_says_so_and_ends(world, module, kind, port):
    """The second instance is configured as the running one is, so it would do harm if it went on."""
    prefix = f"FULMEN_{kind.upper()}_"
    environment = {k: v for k, v in world.stack.spec(port).environment.items() if k.startswith(prefix)}
    del environment[f"{prefix}READY_FILE"]

    taken = await run_module(module, "serve", environment=environment)
    assert taken.status == 1, taken
    [line] = [line for line in taken.stderr.splitlines() if line.startswith("error: ")]
    assert "in use" in line
    assert any(f":{environment.get(prefix + name)}" in line for name in ("PORT", "HTTP_PORT"))
    assert "Traceback" not in taken.stdout + taken.stderr

    unknown = await run_module(module, "serve", environment={**environment, f"{prefix}NO_SUCH": "1"})
    assert unknown.status == USAGE
    assert f"{prefix}NO_SUCH: no such setting" in unknown.stderr
    files = [Path(value) for name, value in environment.items() if name.endswith(("TOKEN_FILE", "KEYS_FILE"))]
    secrets = [value for name, value in environment.items() if name.endswith(("TOKEN", "DATABASE_URL"))]
    secrets += [file.read_text().strip() for file in files]
    assert secrets
    assert not any(secret in unknown.stdout + unknown.stderr for secret in secrets)
    assert "Traceback" not in unknown.stdout + unknown.stderr


async def ask_model(world: World, *, key: str, content: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    """Sends a chat completion to the proxy; returns status and answer."""
    url = f"{world.stack.targets['llm_proxy_http']}/v1/chat/completions"
    body = b'{"model": "none", "messages": [{"role": "user", "content": "%s"}]}' % content
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def announce_body(world: World, size_bytes: int) -> int:
    """Announces a request body to the proxy without sending it; returns the status of the answer."""
    host, _, port = world.stack.targets["llm_proxy_http"].removeprefix("http://").partition(":")
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
                b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
                % (world.stack.client_token.encode(), size_bytes)
            )
            await writer.drain()
            return int((await reader.readline()).split()[1])
        finally:
            writer.close()


def spoil(path: Path, lines: dict[int, str]) -> None:
    """Replaces lines of a file, by number from 1."""
    kept = path.read_text(encoding="utf-8").splitlines()
    for number, text in lines.items():
        kept[number - 1] = text
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
