"""`fulmen up --runners auto`: the local stack starts runners for the queue, and drains them without losing work."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest

from fulmen.rpc.services import Services, Targets, connect
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.local.fleet import FleetPace, FleetRange
from fulmen_cli.local.record import ServiceState, StackFolder, StackRecord, StackState
from fulmen_cli.local.stack import StackSettings
from fulmen_cli.local.supervisor import Supervisor

pytestmark = [pytest.mark.long(short=True), pytest.mark.serial, pytest.mark.timeout(240)]

T = TypeVar("T")

LIMIT_S = 90.0
LOOK_S = 0.05
COUNT = 4
# Each attempt tells which process runs it, and waits until it may go on.
AGENT = """
import os, pathlib, time
place = pathlib.Path({place!r})
def solve(task, context):
    (place / f"began.{{task['n']}}.{{os.getpid()}}").touch()
    while not (place / f"go.{{task['n']}}").exists():
        time.sleep(0.02)
    return 1.0
"""


async def until(read: Callable[[], T | None]) -> T:
    """Looks until there is something to return."""
    async with asyncio.timeout(LIMIT_S):
        while not (found := read()):  # noqa: ASYNC110  # state of other processes
            await asyncio.sleep(LOOK_S)
        return found


async def fulmen(stack: Stack, *arguments: str) -> str:
    """Runs a command on the stack; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fulmen_cli",
        *arguments,
        "--state-dir",
        str(stack.folder.path),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def create(client: Services, count: int) -> list[str]:
    """Queues rollouts for the agent that the runners were started with."""
    batch = [rollout_pb2.Rollout(input=json.dumps({"n": n}).encode()) for n in range(count)]
    created = await client.rollouts.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=batch))
    return [each.name for each in created.rollouts]


async def final(client: Services, name: str) -> rollout_pb2.Rollout:
    """Waits for the end of a rollout."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            got = await client.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
            if got.rollout.state >= rollout_pb2.ROLLOUT_STATE_SUCCEEDED:
                return got.rollout
            await asyncio.sleep(LOOK_S)


class Stack:
    """A supervised stack in this process, and what can be seen of it."""

    def __init__(self, folder: StackFolder, place: Path, supervisor: asyncio.Task[None]) -> None:
        self.folder = folder
        self.place = place
        self.supervisor = supervisor

    def record_if(self, condition: Callable[[StackRecord], object]) -> Callable[[], StackRecord | None]:
        """Makes what reads the record, if it is as it should be."""

        def read() -> StackRecord | None:
            assert not self.supervisor.done(), self.supervisor
            record = self.folder.read()
            return record if record is not None and condition(record) else None

        return read

    def began(self) -> dict[int, int]:
        """Returns the processes of the attempts that began, by number of the task."""
        parts = [path.name.split(".") for path in self.place.glob("began.*")]
        return {int(n): int(pid) for _, n, pid in parts}

    def let_go(self, *numbers: int) -> None:
        """Lets attempts end."""
        for number in numbers:
            (self.place / f"go.{number}").touch()


def runners(record: StackRecord) -> dict[str, ServiceState]:
    """Returns the states of the runners, by name."""
    return {each.name: each.state for each in record.services if each.name.startswith("runner-")}


@pytest.fixture
async def stack(short_tmp_path: Path) -> AsyncIterator[Stack]:
    """Yields a stack of one to two runners of two slots, which changes fast."""
    place, state = short_tmp_path / "p", short_tmp_path / "s"
    place.mkdir()
    (place / "agent.py").write_text(AGENT.format(place=str(place)), encoding="utf-8")
    settings = StackSettings(
        state_dir=state, runners=1, max_runners=2, slots=2, use_default_ports=False,
        environment={"FULMEN_RUNNER_AGENT": f"{place / 'agent.py'}:solve"},
    )  # fmt: skip
    pace = FleetPace(FleetRange(minimum=1, maximum=2), start_pause_s=1, shrink_after_s=1, shrink_pause_s=1)
    folder = StackFolder(state.resolve())
    folder.create()
    with folder.hold():
        supervisor = asyncio.create_task(Supervisor(settings, pace=pace).run())
        yield (stack := Stack(folder, place, supervisor))
        stack.let_go(*range(COUNT))
        if not supervisor.done():
            signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            await supervisor


async def test_runners_come_with_the_queue_and_go_when_their_work_is_done(stack: Stack) -> None:
    record = await until(stack.record_if(lambda one: one.state is StackState.READY))
    assert runners(record) == {"runner-1": ServiceState.READY}
    token = Path(record.client_token_file).read_text(encoding="utf-8").strip()
    targets = Targets(**{name: record.targets[name] for name in ("store", "algorithm", "llm_proxy")})
    async with connect(targets, token=token) as client:
        names = await create(client, COUNT)
        began = await until(lambda: found if len(found := stack.began()) == COUNT else None)
        assert len(set(began.values())) == 2, "the second runner was started for what waited"
        await _the_command_line_shows_and_sets_it(stack)
        # Each runner keeps one attempt: one runner would do, and the other is drained although it works.
        kept = {pid: n for n, pid in began.items()}
        stack.let_go(*(began.keys() - set(kept.values())))
        record = await until(stack.record_if(lambda one: ServiceState.DRAINING in runners(one).values()))
        drained = next(each for each in record.services if each.state is ServiceState.DRAINING)
        assert drained.pid is not None
        stack.let_go(kept[drained.pid])
        record = await until(stack.record_if(lambda one: len(runners(one)) == 1))
        assert drained.name not in runners(record)
        stack.let_go(*range(COUNT))
        for name in names:
            rollout = await final(client, name)
            assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
            assert len(rollout.attempts) == 1, "no attempt was given back or lost"
    status = json.loads(await fulmen(stack, "status", "--output", "json"))
    assert status["healthy"]


async def _the_command_line_shows_and_sets_it(stack: Stack) -> None:
    await until(stack.record_if(lambda one: one.fleet.startswith("auto 1-2: 2 runners, 2 wanted")))
    status = json.loads(await fulmen(stack, "status", "--output", "json"))
    assert status["healthy"]
    assert status["record"]["fleet"].startswith("auto 1-2: 2 runners, 2 wanted")
    store = next(each for each in status["record"]["services"] if each["name"] == "store")
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{store['ports']['store_metrics']}/metrics") as page,
    ):
        figures = await page.text()
    running = re.search(r'^fulmen_store_demand_running\{.*project="projects/default".*\} (\S+)$', figures, re.MULTILINE)
    assert running is not None, figures
    assert float(running[1]) > 0
    assert "fulmen_store_demand_predicted_work_seconds{" in figures
    one = json.loads(await fulmen(stack, "runner", "status", "runner-2", "--output", "json"))
    assert (one["slot_count"], len(one["running"])) == (2, 2)
    # By its session, which the store knows the address of.
    assert "2/2" in await fulmen(stack, "runner", "status", one["runner"])
    stacks = await fulmen(stack, "runner", "stacks", one["runner"].removeprefix("runners/"))
    assert "agent.py" in stacks
    assert "solve" in stacks
    assert "sizes them automatically from now on" in await fulmen(stack, "runner", "slots", "runner-2", "auto")
    assert json.loads(await fulmen(stack, "runner", "slots", "runner-2", "2", "-o", "json")) == {"slot_count": 2}
