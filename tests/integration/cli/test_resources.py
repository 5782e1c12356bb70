"""`fulmen resources` and `fulmen runners` against a store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result

from fulmen.ids import runner_name
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import lease_pb2, resource_pb2
from fulmen.store.v1 import lease_service_pb2 as lease_pb
from fulmen.store.v1 import resource_service_pb2 as pb
from fulmen.store.v1 import runner_registry_service_pb2 as registry_pb
from fulmen_cli.exits import Exit
from tests.support.store.running import LIMIT_S, Runner, Stubs, running_store

Fulmen = Callable[..., Awaitable[str]]


@pytest.fixture
def shown(fulmen: Callable[..., Awaitable[Result]]) -> Fulmen:
    """Returns a function that runs a command and returns its output."""

    async def run(*arguments: str | Path, status: int = 0) -> str:
        return (await fulmen(*arguments, status=status)).stdout

    return run


async def test_a_version_is_published_promoted_compared_and_rolled_back(shown: Fulmen, tmp_path: Path) -> None:
    file = tmp_path / "support.txt"
    for number in range(1, 4):
        file.write_text(f"Be kind.\nAnswer in {number} lines.\n")
        options = ["--after", str(number - 1), "--ttl", "7d", "--metadata", "by=me"]
        done = await shown("resources", "publish", "prompt.s", file, "--kind", "prompt", *options)
        assert done == f"resources/prompt.s/versions/{number}\n"
    await shown("resources", "publish", "prompt.s", file, "--kind", "prompt", "--after", "2", status=Exit.CONFLICT)

    await shown("resources", "rollback", "prompt.s", status=Exit.NOT_FOUND)
    first = await shown("resources", "promote", "prompt.s", "1")
    assert first == "resources/prompt.s/aliases/stable: nothing -> version 1\n"
    moved = await shown("resources", "promote", "prompt.s", "3")
    assert moved == "resources/prompt.s/aliases/stable: version 1 -> version 3\n"
    back = await shown("resources", "rollback", "prompt.s")
    assert back == "resources/prompt.s/aliases/stable: version 3 -> version 2\n"
    await shown("resources", "rollback", "prompt.s", "--to", "3", status=Exit.USAGE)
    await shown("resources", "rollback", "prompt.s", "--to", "1")
    await shown("resources", "rollback", "prompt.s", status=Exit.NOT_FOUND)

    found = await shown("resources", "diff", "prompt.s/aliases/stable")
    assert "-Answer in 1 lines.\n+Answer in 3 lines.\n" in found
    same = await shown("resources", "diff", "prompt.s/versions/3")
    assert "are equal" in same
    listed = await shown("resources", "list", "prompt.s")
    lines = listed.splitlines()
    assert lines[1].split()[0] == "resources/prompt.s/versions/3"
    assert lines[1].split()[-1] == "latest"
    assert lines[3].split()[-1] == "stable"
    text = await shown("resources", "show", "prompt.s/aliases/stable")
    assert "Answer in 1 lines." in text
    assert "expires" in text


async def test_messages_of_the_contract_are_compared_by_their_fields(shown: Fulmen, stubs: Stubs) -> None:
    for argv in ("one", "two"):
        spec = agent_spec_pb2.AgentSpec()
        spec.command.argv.append(argv * 100)
        content = spec.SerializeToString()
        version = resource_pb2.ResourceVersion(name="resources/agent.a", kind="agent", content=content)
        await stubs.resources.PublishResources(pb.PublishResourcesRequest(resources=[version]))
    found = await shown("resources", "diff", "agent.a/versions/1")
    assert f'-  argv: "{"one" * 100}"' in found
    binary = [resource_pb2.ResourceVersion(name="resources/blob.a", kind="blob", content=b"\xff" * n) for n in (3, 5)]
    for version in binary:
        await stubs.resources.PublishResources(pb.PublishResourcesRequest(resources=[version]))
    told = await shown("resources", "diff", "blob.a/versions/1", "blob.a/versions/2")
    assert "resources/blob.a/versions/1: 3 bytes, sha256" in told


async def test_wrong_input_is_told_before_anything_is_sent(shown: Fulmen, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for options in (["--ttl", "soon"], ["--metadata", "nothing"]):
        await shown("resources", "publish", "p", str(tmp_path / "f"), "--kind", "prompt", *options, status=Exit.USAGE)
    await shown("resources", "publish", "p", str(tmp_path / "none"), "--kind", "prompt", status=Exit.USAGE)


async def test_a_watch_goes_on_over_a_restart_of_the_store(database_url: str, tmp_path: Path) -> None:
    async with running_store(database_url) as first:
        token, port = first.token(), first.port
        publish = pb.PublishResourcesRequest(
            resources=[resource_pb2.ResourceVersion(name="resources/prompt.a", kind="prompt", content=b"x")]
        )
        await (await first.stubs()).resources.PublishResources(publish)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fulmen_cli", "resources", "watch", "prompt.", "-o", "json",
            "--store-target", f"127.0.0.1:{port}", "--token", token, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S * 3):
            messages = [json.loads(await process.stdout.readline())]
            while not messages[-1].get("snapshot_complete"):
                messages.append(json.loads(await process.stdout.readline()))
    async with running_store(database_url, port=port) as second:
        await (await second.stubs()).resources.PublishResources(publish)
        async with asyncio.timeout(LIMIT_S * 3):
            while not any("versions/2" in one.get("name", "") for one in messages[-1].get("resources", [])):
                messages.append(json.loads(await process.stdout.readline()))
        process.terminate()
        await process.wait()
    assert sum(message.get("snapshot_complete", False) for message in messages) == 1
    assert messages[0]["resources"][0]["name"] == "resources/prompt.a/versions/1"
    assert "content" not in messages[0]["resources"][0]


async def test_runners_are_shown_with_their_load_and_failures(shown: Fulmen, stubs: Stubs) -> None:
    runner = await Runner(stubs).open(labels={"gpu": "h200"})
    load = lease_pb2.RunnerLoad(cpu_ratio=0.4, memory_bytes=3 * 2**29, memory_limit_bytes=2**33)
    load.gpus.add(utilization_ratio=0.93, memory_bytes=2**30, memory_limit_bytes=2**31)
    await runner.stream.write(lease_pb.StreamLeasesRequest(renew=lease_pb.RenewSession(load=load)))
    request = registry_pb.GetRunnerRequest(name=runner_name(runner.session_id))
    async with asyncio.timeout(LIMIT_S * 3):  # the store writes it with the next renewal, 20 s after the one before
        while not (await stubs.runners.GetRunner(request)).runner.HasField("load"):  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.05)
    text = await shown("runners")
    assert "cpu 40%, 1.5/8.0 GiB, gpu 93% 1.0/2.0 GiB" in text
    assert "gpu=h200" in text
    assert "test-host" in text
    (as_json,) = json.loads(await shown("runners", "-o", "json"))
    assert as_json["load"]["gpus"][0]["utilization_ratio"] == 0.93
