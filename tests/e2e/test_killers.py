"""A tenant's rollouts that kill their runner: they end dead, the stack and the other tenant's rollouts live on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.rpc.services import Services, Targets, connect
from fulmen.store.v1 import failure_pb2, project_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.train_toml.train import AgentConfig
from fulmen_cli.local.credentials import Credentials, issue_token
from fulmen_cli.local.record import ServiceState, StackFolder
from tests.support.algorithm.runs import create_rollouts, ended_rollout, publish_agent
from tests.support.cli.commands import fulmen
from tests.support.stack import own_ports

pytestmark = [pytest.mark.long(short=True), pytest.mark.serial, pytest.mark.timeout(600)]

LIMIT_S = 400.0
AGENT = """
import asyncio

async def solve(task):
    await asyncio.sleep(task["seconds"])
    return 1.0
"""


@pytest.fixture
async def stack(short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StackFolder]:
    """Yields what `fulmen up` started."""
    monkeypatch.setenv("FULMEN_STORE_LEASE_TTL_S", "3")
    there = ("--state-dir", own_ports(short_tmp_path / "s").path)
    done = await fulmen("up", "--slots", "8", *there)
    try:
        assert done.status == 0, done.stdout + done.stderr
        yield StackFolder(short_tmp_path / "s")
    finally:
        await fulmen("down", *there)


@contextlib.asynccontextmanager
async def tenant(stack: StackFolder, name: str) -> AsyncIterator[Services]:
    """Yields the client of a new project."""
    record = stack.read_running()
    targets = Targets(**{each: record.targets[each] for each in ("store", "algorithm", "llm_proxy")})
    admin = Path(record.client_token_file).read_text().strip()
    async with connect(targets, token=admin) as client:
        project = project_service_pb2.Project(name=f"projects/{name}")
        await client.projects.CreateProject(project_service_pb2.CreateProjectRequest(project=project))
    key = Credentials(stack.path).signing_key()
    token = issue_token(key, "client", subject=name, ttl_s=3600, project=f"projects/{name}")
    async with connect(targets, token=token) as client:
        yield client


async def published(client: Services, folder: Path) -> str:
    source = folder / "agent"
    source.mkdir(exist_ok=True)
    (source / "agent.py").write_text(AGENT)
    return await publish_agent(client, source, "agent", AgentConfig(python="agent.py:solve"))


async def stats(client: Services) -> pb.GetQueueStatsResponse:
    answer: pb.GetQueueStatsResponse = await client.rollouts.GetQueueStats(pb.GetQueueStatsRequest())
    return answer


async def kill_runners(stack: StackFolder, client: Services, names: list[str]) -> None:
    """Kills the runner whenever it has begun a rollout of these, as they would themselves; until cancelled."""
    seen: set[str] = set()
    while True:
        found = [(await client.rollouts.GetRollout(pb.GetRolloutRequest(name=name))).rollout for name in names]
        running = {each.attempts[-1].name for each in found if each.state == rollout_pb2.ROLLOUT_STATE_RUNNING} - seen
        runner = stack.read_running().service("runner-1")
        if running and runner.state is ServiceState.READY and runner.pid is not None:
            # The supervisor may have noticed by itself that it is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(runner.pid, signal.SIGKILL)
            seen |= running
        await asyncio.sleep(0.1)


async def test_four_rollouts_that_kill_their_runner_stop_neither_the_stack_nor_another_tenant(
    stack: StackFolder, short_tmp_path: Path
) -> None:
    async with asyncio.timeout(LIMIT_S), tenant(stack, "bad") as bad, tenant(stack, "good") as good:
        killer, patient = await published(bad, short_tmp_path), await published(good, short_tmp_path)
        killers = await create_rollouts(bad, killer, [b'{"seconds": 3600}'] * 4)
        others = await create_rollouts(good, patient, [b'{"seconds": 1}'] * 6)
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(kill_runners(stack, bad, killers))
            for name in others:
                assert (await ended_rollout(good, name)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
            while not (await stats(bad)).paused_agents:  # noqa: ASYNC110  # state of another process
                await asyncio.sleep(0.1)
            listed = await fulmen("queue", "--state-dir", stack.path, "--output", "json")
            assert listed.status == 0, listed.stderr
            left = [name for name in killers if name not in (await stats(bad)).paused_agents[0].rollouts]
            assert len(left) == 1
            resumed = await fulmen("agent", "resume", killer, "--project", "bad", "--state-dir", stack.path)
            assert "Resumed" in resumed.stdout, resumed.stderr
            for name in killers:
                dead = await ended_rollout(bad, name)
                assert dead.failure_kind == failure_pb2.FAILURE_KIND_RUNNER_LOST
                # A runner that was killed as it took the rollout, or stopped, gave it back: that is no try.
                tries = [each for each in dead.attempts if each.failure_kind != failure_pb2.FAILURE_KIND_RELEASED]
                assert len(tries) <= 3
            killing.cancel()
    record = stack.read_running()
    assert record.service("runner-1").restarts >= 4
    assert {each.restarts for each in record.services if each.name != "runner-1"} == {0}
