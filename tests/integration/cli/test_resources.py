"""`fulmen resources` and `fulmen runners` against a store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fulmen.ids import runner_name
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import lease_pb2, resource_pb2
from fulmen.store.v1 import lease_service_pb2 as lease_pb
from fulmen.store.v1 import resource_service_pb2 as pb
from fulmen.store.v1 import runner_registry_service_pb2 as registry_pb
from fulmen_cli.exits import Exit
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, running_store

Fulmen = Callable[..., Awaitable[str]]


@pytest.fixture
def fulmen(store: StoreHandle) -> Fulmen:
    """Runs a command against the store and returns what it printed; `code` is the exit status that it must have."""

    async def run(*arguments: str, code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fulmen_cli", *arguments, "--store-target", store.target, "--token", store.token(),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(LIMIT_S * 2):
            output, errors = await process.communicate()
        assert process.returncode == code, (output + errors).decode()
        return output.decode()

    return run


async def test_a_version_is_published_promoted_compared_and_rolled_back(fulmen: Fulmen, tmp_path: Path) -> None:
    file = tmp_path / "support.txt"
    for number in range(1, 4):
        file.write_text(f"Be kind.\nAnswer in {number} lines.\n")
        options = ["--after", str(number - 1), "--ttl", "7d", "--metadata", "by=me"]
        done = await fulmen("resources", "publish", "prompt.s", str(file), "--kind", "prompt", *options)
        assert done == f"resources/prompt.s/versions/{number}\n"
    await fulmen("resources", "publish", "prompt.s", str(file), "--kind", "prompt", "--after", "2", code=Exit.CONFLICT)

    await fulmen("resources", "rollback", "prompt.s", code=Exit.NOT_FOUND)
    first = await fulmen("resources", "promote", "prompt.s", "1")
    assert first == "resources/prompt.s/aliases/stable: nothing -> version 1\n"
    moved = await fulmen("resources", "promote", "prompt.s", "3")
    assert moved == "resources/prompt.s/aliases/stable: version 1 -> version 3\n"
    back = await fulmen("resources", "rollback", "prompt.s")
    assert back == "resources/prompt.s/aliases/stable: version 3 -> version 2\n"
    await fulmen("resources", "rollback", "prompt.s", "--to", "3", code=Exit.USAGE)
    await fulmen("resources", "rollback", "prompt.s", "--to", "1")
    await fulmen("resources", "rollback", "prompt.s", code=Exit.NOT_FOUND)

    found = await fulmen("resources", "diff", "prompt.s/aliases/stable")
    assert "-Answer in 1 lines.\n+Answer in 3 lines.\n" in found
    same = await fulmen("resources", "diff", "prompt.s/versions/3")
    assert "are equal" in same
    listed = await fulmen("resources", "list", "prompt.s")
    lines = listed.splitlines()
    assert lines[1].split()[0] == "resources/prompt.s/versions/3"
    assert lines[1].split()[-1] == "latest"
    assert lines[3].split()[-1] == "stable"
    shown = await fulmen("resources", "show", "prompt.s/aliases/stable")
    assert "Answer in 1 lines." in shown
    assert "expires" in shown


async def test_messages_of_the_contract_are_compared_by_their_fields(fulmen: Fulmen, stubs: Stubs) -> None:
    for argv in ("one", "two"):
        spec = agent_spec_pb2.AgentSpec()
        spec.command.argv.append(argv * 100)
        content = spec.SerializeToString()
        version = resource_pb2.ResourceVersion(name="resources/agent.a", kind="agent", content=content)
        await stubs.resources.PublishResources(pb.PublishResourcesRequest(resources=[version]))
    found = await fulmen("resources", "diff", "agent.a/versions/1")
    assert f'-  argv: "{"one" * 100}"' in found
    binary = [resource_pb2.ResourceVersion(name="resources/blob.a", kind="blob", content=b"\xff" * n) for n in (3, 5)]
    for version in binary:
        await stubs.resources.PublishResources(pb.PublishResourcesRequest(resources=[version]))
    told = await fulmen("resources", "diff", "blob.a/versions/1", "blob.a/versions/2")
    assert "resources/blob.a/versions/1: 3 bytes, sha256" in told


async def test_wrong_input_is_told_before_anything_is_sent(fulmen: Fulmen, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for options in (["--ttl", "soon"], ["--metadata", "nothing"]):
        await fulmen("resources", "publish", "p", str(tmp_path / "f"), "--kind", "prompt", *options, code=Exit.USAGE)
    await fulmen("resources", "publish", "p", str(tmp_path / "none"), "--kind", "prompt", code=Exit.USAGE)


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


async def test_runners_are_shown_with_their_load_and_failures(fulmen: Fulmen, stubs: Stubs) -> None:
    runner = await Runner(stubs).open(labels={"gpu": "h200"})
    load = lease_pb2.RunnerLoad(cpu_ratio=0.4, memory_bytes=3 * 2**29, memory_limit_bytes=2**33)
    load.gpus.add(utilization_ratio=0.93, memory_bytes=2**30, memory_limit_bytes=2**31)
    await runner.stream.write(lease_pb.StreamLeasesRequest(renew=lease_pb.RenewSession(load=load)))
    request = registry_pb.GetRunnerRequest(name=runner_name(runner.session_id))
    async with asyncio.timeout(LIMIT_S):
        while not (await stubs.runners.GetRunner(request)).runner.HasField("load"):  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.05)
    shown = await fulmen("runners")
    assert "cpu 40%, 1.5/8.0 GiB, gpu 93% 1.0/2.0 GiB" in shown
    assert "gpu=h200" in shown
    assert "test-host" in shown
    (as_json,) = json.loads(await fulmen("runners", "-o", "json"))
    assert as_json["load"]["gpus"][0]["utilization_ratio"] == 0.93
