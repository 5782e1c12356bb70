"""Two algorithm services, processes with a real store, train from a shared folder: killed, stopped, and fenced."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.errors import Unavailable
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.models import small_model
from tests.support.algorithm.runs import FINAL_RUN_STATES, eventually
from tests.support.store.running import StoreHandle, running_store

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

START_LIMIT_S = 120.0
TAKEOVER_LIMIT_S = 60.0
STEPS = 400
SETTINGS = {"steps": STEPS, "batch_size": 2, "checkpoint_every": 20, "report_every": 1, "seed": 5}
SUCCEEDED = pb.TRAINING_RUN_STATE_SUCCEEDED


@dataclass(kw_only=True)
class Service:
    """A process, and a client of it."""

    process: subprocess.Popen[bytes]
    address: str
    runs: TrainingRunServiceStub
    log: Path

    async def get(self, run: str) -> pb.TrainingRun:
        return (await self.runs.GetTrainingRun(service_pb.GetTrainingRunRequest(name=run))).training_run

    async def losses(self, run: str) -> dict[int, float]:
        """Follows a run to its end over changes of its owner; returns the loss of each step."""
        found: dict[int, float] = {}
        sequence = 0
        while True:
            request = service_pb.WatchTrainingRunRequest(name=run, after_sequence=sequence)
            try:
                async for answer in self.runs.WatchTrainingRun(request):
                    event = answer.event
                    assert event.sequence == sequence + 1
                    sequence = event.sequence
                    if "loss" in event.step.values:
                        found[event.step.step] = event.step.values["loss"]
                    if event.run.state in FINAL_RUN_STATES:
                        assert event.run.state == SUCCEEDED, event.run.failure_message
                        return found
            except Unavailable:
                await asyncio.sleep(0.2)  # the owner has gone, and its lease has not ended


@asynccontextmanager
async def service(store: StoreHandle, folder: Path, storage: Path) -> AsyncIterator[Service]:
    folder.mkdir()
    ready, log = folder / "ready.json", folder / "log"
    settings = {
        "PORT": "0", "METRICS_PORT": "0", "STATE_DIR": str(folder / "state"), "READY_FILE": str(ready),
        "TOKEN": store.token(Role.SERVICE, project="projects/*"), "STORE_TARGET": store.target, "MODEL_ROOTS": "/",
        "RUN_STORAGE": str(storage), "RUN_LEASE_S": "3", "MAX_CONCURRENT_RUNS": "1", "LLM_PROXY_TARGET": "127.0.0.1:1",
    }  # fmt: skip
    environment = os.environ | {f"FULMEN_ALGORITHM_{name}": value for name, value in settings.items()}
    with log.open("wb") as output:
        argv = [sys.executable, "-m", "fulmen_algorithm", "serve"]
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready.exists() or not ready.read_bytes():  # a process of its own
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.1)
        address = f"127.0.0.1:{json.loads(ready.read_bytes())['port']}"
        async with open_channel(address, token=store.token(Role.CLIENT, project="projects/default")) as channel:
            yield Service(process=process, address=address, runs=TrainingRunServiceStub(channel), log=log)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        await asyncio.to_thread(process.wait, START_LIMIT_S)


@dataclass(kw_only=True)
class World:
    """A store, two services, and the runs' folder."""

    store: StoreHandle
    services: list[Service]
    runs: Path
    model: Path
    demonstrations: str

    async def create(self, name: str) -> str:
        run = pb.TrainingRun(
            name=f"projects/default/trainingRuns/{name}",
            algorithm="sft",
            settings_json=json.dumps(SETTINGS),
            policy=pb.PolicySpec(name=name, path=str(self.model)),
            inputs={"demonstrations": self.demonstrations},
        )
        request = service_pb.CreateTrainingRunRequest(training_run=run, request_id=name)
        # The same request to both creates one run.
        for each in self.services:
            assert (await each.runs.CreateTrainingRun(request)).training_run.name == run.name
        return run.name

    async def owner_and_other(self, run: str) -> tuple[Service, Service]:
        """Waits until a service runs a run at some step; returns it and the other one."""

        async def owned() -> str | None:
            found = await self.services[0].get(run)
            return found.owner_address if found.step >= 40 else None

        address = await eventually(owned, what=f"{run} takes steps")
        first, second = self.services
        return (first, second) if first.address == address else (second, first)


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(database_url))
        stubs = await store.stubs()
        line = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
        dataset = resource_pb2.ResourceVersion(
            name="resources/dataset.one", kind="dataset", content=json.dumps(line).encode()
        )
        await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[dataset]))
        services = [
            await stack.enter_async_context(service(store, tmp_path / name, tmp_path / "shared")) for name in ("a", "b")
        ]
        yield World(
            store=store,
            services=services,
            runs=tmp_path / "shared/runs",
            model=small_model(tmp_path / "model", hidden=16, layers=1),
            demonstrations="resources/dataset.one/versions/1",
        )


async def test_a_killed_or_stopped_owner_is_replaced_and_fenced_and_the_loss_is_that_of_a_calm_run(world: World):
    calm = await world.services[0].losses(await world.create("calm"))

    stopped = await world.create("stopped")
    owner, other = await world.owner_and_other(stopped)
    os.kill(owner.process.pid, signal.SIGSTOP)
    await _owned_by(other, stopped)
    os.kill(owner.process.pid, signal.SIGCONT)
    assert await other.losses(stopped) == calm
    files = RunFiles(world.runs / "default/stopped")
    assert (files.epoch, files.load_run().state.value) == (2, "SUCCEEDED")
    # The former owner answers for the run, from what the new one wrote, and has published nothing since.
    again = await owner.get(stopped)
    assert (again.state, again.step, again.policy_version) == (
        SUCCEEDED,
        STEPS,
        (await other.get(stopped)).policy_version,
    )

    killed = await world.create("killed")
    owner, other = await world.owner_and_other(killed)
    owner.process.kill()
    await _owned_by(other, killed)
    assert await other.losses(killed) == calm


async def _owned_by(service: Service, run: str) -> None:
    async def owned() -> bool:
        found = await service.get(run)
        assert found.state != SUCCEEDED, "the run ended before it was disturbed"
        return found.owner_address == service.address

    loop = asyncio.get_running_loop()
    began = loop.time()
    await eventually(owned, what=f"{run} is taken over", deadline_s=TAKEOVER_LIMIT_S)
    print(f"taken over after {loop.time() - began:.1f} s")
