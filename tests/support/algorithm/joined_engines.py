"""Runs whose versions are published on request, and engines of other machines that join them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulmen.algorithm.v1.training_run_pb2 import PolicySpec, TrainingRun
from fulmen.algorithm.v1.training_run_service_pb2 import CreateTrainingRunRequest
from fulmen.rpc.services import connect
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm import publishing
from tests.support.algorithm.runs import FINAL_RUN_STATES, eventually, read_run
from tests.support.algorithm.training import BUILD, BUILDER, publish_training_inputs
from tests.support.end_to_end import World
from tests.support.ports import free_ports
from tests.support.stack import running_stack, stack_targets

__all__ = ["Agent", "Publishing", "open_world", "started_publishing", "weight_agent"]

LIMIT_S = 240.0
END_LIMIT_S = 60


class OpenStack(LocalStack):
    """A stack that other machines reach, and whose proxy gives the engines' key to any of theirs."""

    hosts: Sequence[str] = ()

    async def start_process(self, spec: Any) -> Any:
        """Starts a service that listens to all of its machine's addresses."""
        changed = {name: "0.0.0.0" for name in spec.environment if name == f"FULMEN_{spec.kind.upper()}_HOST"}
        if (keys := spec.environment.get("FULMEN_LLM_PROXY_BACKEND_KEYS")) is not None:
            entry = json.loads(keys)
            entry["engine"]["hosts"] += self.hosts
            changed["FULMEN_LLM_PROXY_BACKEND_KEYS"] = json.dumps(entry)
        return await super().start_process(replace(spec, environment={**spec.environment, **changed}))


@asynccontextmanager
async def open_world(folder: Path, hosts: Sequence[str], **environment: str) -> AsyncIterator[World]:
    """Runs a stack for runs of `publishing`, whose engines are on machines of these addresses."""

    class Stack(OpenStack):
        pass

    Stack.hosts = hosts
    variables = {"FULMEN_ALGORITHM_MODULES": publishing.__file__, **environment}
    async with (
        running_stack(folder, environment=variables, make=Stack) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        yield World(stack=stack, client=client, state_dir=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A weight agent.

    Attributes:
        process: Its process.
        folder: Its folder.
        port: Port of its engine.
        started_s: When it was started, by `time.monotonic`.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    started_s: float

    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns what it has logged under a name, in order."""
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if each.get("event") == name]

    def loaded(self) -> list[int]:
        """Returns the versions that its engine has loaded."""
        return [each["version"] for each in self.events("weights_loaded")]

    async def until_loaded(self, version: int, *, deadline_s: float = LIMIT_S) -> dict[str, Any]:
        """Waits until its engine has loaded a version, or a newer one; returns what it has logged of it."""

        async def loaded() -> dict[str, Any] | None:
            assert self.process.poll() is None, (self.folder / "log").read_text(errors="replace")
            return next((each for each in self.events("weights_loaded") if each["version"] >= version), None)

        what = f"{self.folder.name} has version {version}"
        found: dict[str, Any] = await eventually(loaded, what=what, deadline_s=deadline_s)
        return found


@asynccontextmanager
async def weight_agent(
    world: World, run: str, folder: Path, *, within: Sequence[str] = (), **settings: object
) -> AsyncIterator[Agent]:
    """Runs a weight agent with a token of its own until the block ends; its engine has the folder's name."""
    issued = await world.fulmen("token", "issue", "--role", "engine", "--run", run, "--subject", folder.name)
    assert issued.status == 0, issued.stderr
    folder.mkdir()
    (folder / "token").write_text(issued.stdout)
    targets = stack_targets(world.stack)
    algorithm = world.stack.spec("algorithm").environment
    port = free_ports()[0]
    values: dict[str, object] = {
        "token_file": folder / "token",
        "store_target": targets.store,
        "algorithm_target": targets.algorithm,
        "state_dir": folder / "state",
        "engine_port": port,
        "engine_token": algorithm.get("FULMEN_ALGORITHM_ENGINE_TOKEN", ""),
        "engine_id": folder.name,
    }
    variables = {f"FULMEN_WEIGHT_AGENT_{name.upper()}": str(value) for name, value in (values | settings).items()}
    started_s = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "fulmen_algorithm.weight_agent", "serve"],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
        )
    try:
        yield Agent(process=process, folder=folder, port=port, started_s=started_s)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, END_LIMIT_S)
        finally:
            process.kill()
            sys.stdout.write((folder / "log").read_text(errors="replace"))


def elsewhere(world: World, *, service: str, own: str) -> Mapping[str, object]:
    """Returns the settings of an agent on another machine.

    Args:
        world: The deployment.
        service: Address of its machine.
        own: Address of the agent's machine.
    """
    targets = stack_targets(world.stack)
    return {
        "store_target": targets.store.replace("127.0.0.1", service),
        "algorithm_target": targets.algorithm.replace("127.0.0.1", service),
        "host": "0.0.0.0",
        "engine_host": "0.0.0.0",
        "engine_advertise_host": own,
    }


@dataclass(slots=True, kw_only=True)
class Publishing:
    """A run that publishes a version when it is told to.

    Attributes:
        world: The deployment.
        run: Its name.
        policy: Its policy's.
        orders: Folder of the orders.
        version: The version that was ordered last.
    """

    world: World
    run: str
    policy: str
    orders: Path
    version: int = 1

    def order(self) -> int:
        """Has it train a step and publish; returns the number of the version."""
        (self.orders / str(self.version)).touch()
        self.version += 1
        return self.version

    async def until(self, done: Callable[[TrainingRun], bool], what: str) -> TrainingRun:
        """Waits for a state of the run, which must not have failed."""

        async def reached() -> TrainingRun | None:
            found = await read_run(self.world.client, self.run)
            assert not found.failure_message, found
            assert done(found) or found.state not in FINAL_RUN_STATES, found
            return found if done(found) else None

        found: TrainingRun = await eventually(reached, what=what, deadline_s=LIMIT_S)
        return found

    async def published(self) -> int:
        """Publishes a version; returns when the run has gone on."""
        version = self.order()
        await self.until(lambda run: run.step >= version - 1, f"version {version} is published")
        return version

    async def notices(self) -> str:
        """Returns what the run was told."""
        shown = await self.world.fulmen("run", "show", self.run, "--output", "json")
        assert shown.status == 0, shown.stderr
        return shown.stdout


async def started_publishing(
    world: World,
    repository_root: Path,
    name: str,
    folder: Path,
    *,
    builder: bytes = BUILDER,
    **settings: object,
) -> Publishing:
    """Creates a run that publishes on request, and waits until it serves its first version."""
    inputs = await publish_training_inputs(world.client, repository_root, policy=name, builder=builder)
    orders = folder / f"orders-{name}"
    orders.mkdir()
    run = TrainingRun(
        name=f"projects/default/trainingRuns/{name}",
        algorithm="publishing",
        settings_json=json.dumps({"steps": 100_000, "orders": str(orders), "weights": {"kind": "delta"}, **settings}),
        policy=PolicySpec(name=name, build=BUILD),
        inputs={use: inputs[use] for use in ("demonstrations", "bundle")},
    )
    await world.client.training_runs.CreateTrainingRun(CreateTrainingRunRequest(training_run=run))
    made = Publishing(world=world, run=run.name, policy=name, orders=orders)
    await made.until(lambda found: found.ready_engine_count > 0, "the run serves")
    return made
