"""The files of an agent stay on disk as long as a program or an attempt uses them, and no longer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen_runner.agents import catalogue as catalogue_module
from fulmen_runner.agents.bundles import UnpackedBundles
from fulmen_runner.agents.catalogue import Catalogue
from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.host import CommandHost
from fulmen_runner.agents.environment import Endpoints, expanded_environment
from fulmen_runner.agents.hosts import Hosts
from fulmen_runner.agents.judge import JudgeClient
from fulmen_runner.agents.specification import Bundle, PythonTarget, Specification
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.executor import AttemptExecutor
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded
from fulmen_runner.attempts.workspace import Workspaces
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.isolation.levels import Isolation
from tests.support.runner.assignments import assignment, tracing_restored
from tests.support.runner.bundles import archive, file
from tests.support.runner.captures import Captures, all_acknowledged
from tests.support.runner.in_process import python_host
from tests.support.runner.wheels import venvs_of

WAIT_S = 20.0
AGENT = b"""
from pathlib import Path

def solve(task):
    if "gate" in task:
        Path(task["gate"]).read_text()
    return float(Path(__file__).with_name("later.txt").read_text())
"""


@dataclass(kw_only=True)
class Shelf:
    """A library of agents, each of a bundle: those that a test put there."""

    bundles: dict[str, Bundle] = field(default_factory=dict)

    def put(self, name: str, number: int, agent: bytes = AGENT) -> None:
        data = archive(file("agent.py", agent), file("later.txt", str(number).encode()))
        self.bundles[name] = Bundle(archive=data, sha256_hex=hashlib.sha256(data).hexdigest())

    async def specification(self, name: str, project: str) -> Specification:
        return Specification(
            bundle=name,
            entry=PythonTarget(target="agent.py:solve", isolation=Isolation.TRUSTED),
            grader=None,
            environment={},
        )

    async def prompts(self, assignment: Assignment) -> dict[str, str]:
        return {}

    async def secrets(self, assignment: Assignment) -> dict[str, str]:
        return {}

    async def bundle(self, name: str, project: str) -> Bundle:
        return self.bundles[name]


@dataclass(kw_only=True)
class Bench:
    """A runner's executor with its catalogue, and the directory of its bundles."""

    shelf: Shelf
    executor: AttemptExecutor
    work_dir: Path

    async def run(self, agent: str, task: dict[str, str] | None = None, timeout_s: float = WAIT_S) -> Outcome:
        item = replace(assignment(input_=json.dumps(task or {}).encode(), timeout_s=timeout_s), agent=agent)
        return await self.executor.execute(item)

    async def left(self) -> list[str]:
        """Returns the digests of the bundles that are there when what is to be deleted is deleted."""
        await asyncio.sleep(0)  # A dropped program's use ends in the loop's next round.
        for thread in threading.enumerate():
            if thread.name == "bundle deletion":
                await asyncio.to_thread(thread.join, WAIT_S)
        return sorted(path.name.split("-")[1] for path in self.work_dir.iterdir())

    def digests(self, *names: str) -> list[str]:
        return sorted({self.shelf.bundles[name].sha256_hex for name in names})


@pytest_asyncio.fixture
async def bench(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    """Yields a bench that keeps two programs."""
    monkeypatch.setattr(catalogue_module, "MAX_PROGRAMS", 2)
    shelf = Shelf()
    with tracing_restored():
        async with python_host() as python:
            catalogue = Catalogue(
                library=shelf,
                commands=CommandHost(guardian=Guardian(), inherited={}, work_dir=tmp_path, output_allowed_bytes=1),
                python=python,
                default=None,
                hosts=Hosts(
                    RunnerSettings.model_validate({"dev_mode": True}), Endpoints(llm_proxy_url="", otlp_url="")
                ),
                judges=JudgeClient(),
                bundles=UnpackedBundles(work_dir=tmp_path),
                venvs=venvs_of(tmp_path_factory.mktemp("venvs")),
            )
            executor = AttemptExecutor(
                captures=Captures(),
                programs=catalogue,
                stragglers=python.stragglers,
                environment_of=lambda _: {"TRACEPARENT": f"00-{'1' * 32}-{'2' * 16}-01"},
                expand_environment=expanded_environment,
                workspaces=Workspaces(),
                flush_spans=all_acknowledged,
            )
            yield Bench(shelf=shelf, executor=executor, work_dir=tmp_path)


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a pipe at which an agent waits until a test has opened and closed it."""
    path = tmp_path_factory.mktemp("gate") / "gate"
    os.mkfifo(path)
    yield path
    # Releases a thread that still waits at it after a failure: the event loop would wait for the thread.
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def reward(outcome: Outcome) -> float:
    assert isinstance(outcome, Succeeded), outcome
    return outcome.rewards[0].value


async def test_old_versions_go_and_come_back(bench: Bench) -> None:
    for number in range(5):
        bench.shelf.put(f"v{number}", number)
        assert reward(await bench.run(f"v{number}")) == number
    assert await bench.left() == bench.digests("v3", "v4")
    assert reward(await bench.run("v0")) == 0
    assert await bench.left() == bench.digests("v4", "v0")


async def test_files_that_several_programs_share_go_with_the_last(bench: Bench) -> None:
    for name, number in (("a", 1), ("b", 1), ("c", 2), ("d", 3)):
        bench.shelf.put(name, number)
    outcomes = await asyncio.gather(bench.run("a"), bench.run("b"), bench.run("a"))
    assert [reward(each) for each in outcomes] == [1, 1, 1]
    assert await bench.left() == bench.digests("a")
    await bench.run("c")
    assert await bench.left() == bench.digests("b", "c")
    await bench.run("d")
    assert await bench.left() == bench.digests("c", "d")


async def test_files_of_an_agent_that_cannot_be_loaded_do_not_stay(bench: Bench) -> None:
    bench.shelf.put("broken", 1, agent=b"1 / 0")
    outcome = await bench.run("broken")
    assert isinstance(outcome, Failed)
    assert "ZeroDivisionError" in outcome.message
    assert await bench.left() == []


async def test_a_running_attempt_keeps_its_files(bench: Bench, gate: Path) -> None:
    for number in range(4):
        bench.shelf.put(f"v{number}", number)
    running = asyncio.create_task(bench.run("v0", {"gate": str(gate)}))
    # Opened when the agent has opened it, too.
    entrance = await asyncio.wait_for(asyncio.to_thread(gate.open, "w"), WAIT_S)
    for number in range(1, 4):
        await bench.run(f"v{number}")
    assert await bench.left() == bench.digests("v0", "v2", "v3")
    entrance.close()
    assert reward(await asyncio.wait_for(running, WAIT_S)) == 0
    assert await bench.left() == bench.digests("v2", "v3")


async def test_what_an_attempt_left_running_keeps_its_files(bench: Bench, gate: Path) -> None:
    for number in range(3):
        bench.shelf.put(f"v{number}", number)
    ended = asyncio.Event()
    bench.executor.stragglers.on_change = lambda: bench.executor.stragglers or ended.set()
    running = asyncio.create_task(bench.run("v0", {"gate": str(gate)}, timeout_s=3))
    entrance = await asyncio.wait_for(asyncio.to_thread(gate.open, "w"), WAIT_S)
    outcome = await asyncio.wait_for(running, WAIT_S)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT
    await bench.run("v1")
    await bench.run("v2")
    assert await bench.left() == bench.digests("v0", "v1", "v2")
    entrance.close()
    await asyncio.wait_for(ended.wait(), WAIT_S)
    assert await bench.left() == bench.digests("v1", "v2")
