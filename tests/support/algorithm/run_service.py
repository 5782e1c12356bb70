"""A tiny model on disk, and runs over a model of the other services."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.clients.hub import HubLimits, HubModels
from fulmen_algorithm.models.bases import BaseModels
from fulmen_algorithm.models.model_store import ModelStore
from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.algorithm import RunSettings
from fulmen_algorithm.runs.context import OnNoSignal
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft
from fulmen_algorithm.runs.creation.stages import checked_runs
from fulmen_algorithm.runs.entry import Entry, EventLog
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.execution import RunExecutor
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.ports import EngineCount, Notify, RunFence
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState, TrainingRun
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.transport.training_runs import own_past
from tests.support.algorithm.model_services import (
    Crashes,
    ModelChat,
    ModelQueue,
    ModelResources,
    ModelServing,
    World,
)
from tests.support.algorithm.models import small_model
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_leases import ModelRunLeases
from tests.support.algorithm.training import check_books, read_consumed

ALGORITHMS = load_registry([Path(__file__).parents[3] / "examples/best_of_n/algorithm.py"])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the smallest model."""
    return small_model(tmp_path_factory.mktemp("tiny"), hidden=16, layers=1)


@dataclass(kw_only=True)
class Service:
    """One life of the service's inside."""

    runs: RunRegistry
    worker: RunWorker
    torch_thread: TorchThread
    threads: ThreadPoolExecutor
    """Where `asyncio.to_thread` works in this life."""
    folder: RunStorage
    ownership: RunOwnership
    connections: "ModelConnections"

    async def finish(self, run: TrainingRun) -> TrainingRun:
        """Waits until a run has ended; returns it."""
        return await self.runs.wait_final(run.name, timeout_s=WAIT_S)

    def close(self) -> None:
        """Ends it like its process would: no thread is left when the next life begins."""
        self.torch_thread.close()
        self.threads.shutdown(cancel_futures=True)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        self.folder.__exit__(None, None, None)


NO_HUB = HubModels("", HubLimits(max_bytes=1, deadline_s=1.0))
OpenTrainer = Callable[[TrainerSetup, Notify], Awaitable[Trainer]]


@dataclass(frozen=True, kw_only=True)
class ModelConnections:
    """Connects runs to a world."""

    world: World
    opens: OpenTrainer

    def queue(self, run: TrainingRun, settings: object, notify: Notify, *, fence: RunFence) -> ModelQueue:
        return ModelQueue(self.world.of(run), fence)

    def resources(self, project: str, notify: Notify, *, fence: RunFence | None = None) -> ModelResources:
        return ModelResources(self.world, fence)

    def serving(self, run: TrainingRun, settings: object, notify: Notify) -> ModelServing:
        return ModelServing(self.world.of(run))

    def engines(self, run: TrainingRun) -> EngineCount:
        return EngineCount()

    def hand_over(self, run: TrainingRun) -> None:
        self.world.of(run).handed_over = True

    def chat(self, project: str, notify: Notify) -> ModelChat:
        return ModelChat(self.world)

    async def open_trainer(self, setup: TrainerSetup, notify: Notify) -> Trainer:
        return await self.opens(setup, notify)

    async def placed(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, trains: bool) -> RunSettings:
        return settings

    def leave(self, run: TrainingRun) -> None:
        pass

    async def build_model(self, bundle: bytes, target: str, files: RunFiles, *, seed: int) -> None:
        raise AssertionError("no run of these tests builds a model")


def service_at(
    state: Path,
    world: World,
    open_trainer: OpenTrainer | None = None,
    *,
    storage: str = "",
    hub: HubModels | None = None,
    on_no_signal: OnNoSignal = "notice",
) -> Service:
    """Starts the service's inside over a world."""
    folder = RunStorage(state, url=storage).__enter__()
    runs = RunRegistry(folder, clock=now, max_concurrent=2)
    for run, files in folder.runs():
        runs.restore(run, files)
    ownership = RunOwnership(
        runs,
        ModelRunLeases(world.leases, owner=folder.owner, storage=folder.storage_id),
        folder,
        lease_s=60.0,
        outage_limit_s=WAIT_S,
    )
    torch_thread, threads = TorchThread(torch_threads=1), ThreadPoolExecutor()
    asyncio.get_running_loop().set_default_executor(threads)
    connections = ModelConnections(
        world=world,
        opens=open_trainer or (lambda setup, notify: InProcessTrainer.open(setup, thread=torch_thread, device="cpu")),
    )
    executor = RunExecutor(
        registry=ALGORITHMS,
        connections=connections,
        keep_checkpoints=2,
        keep_models=2,
        machine={"device": "cpu"},
        check_owned=ownership.check,
        models=BaseModels(ModelStore(folder.folder.with_name("models")), hub or NO_HUB),
        on_no_signal=on_no_signal,
    )
    worker = RunWorker(runs, executor, ownership)
    return Service(
        runs=runs,
        worker=worker,
        torch_thread=torch_thread,
        threads=threads,
        folder=folder,
        ownership=ownership,
        connections=connections,
    )


@pytest.fixture
def open_service(tmp_path: Path) -> Callable[..., Service]:
    """Returns what starts the service's inside over a world; the state folder stays the same."""
    return partial(service_at, tmp_path / "state")


def made_world() -> World:
    """Makes a world with the data sets of the tests."""
    made = World(chance=random.Random(0))
    tasks = b"\n".join(json.dumps({"question": f"{i}+1="}).encode() for i in range(7))
    made.add_resource("resources/dataset.train", tasks)
    made.add_resource("resources/dataset.validation", tasks[: tasks.rindex(b"\n")])
    made.add_resource("resources/agent.solver", b"agent")
    demonstration = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    made.add_resource("resources/dataset.demonstrations", json.dumps(demonstration).encode())
    return made


@pytest.fixture
def world() -> World:
    return made_world()


@pytest.fixture
def grpo_draft(tiny_model: Path) -> RunDraft:
    return grpo_draft_of(tiny_model)


def grpo_draft_of(model: Path) -> RunDraft:
    """Returns a small GRPO run over the data sets of `made_world`."""
    settings = {
        "steps": 4,
        "prompts_per_step": 2,
        "group_size": 3,
        "minibatches": 1,
        "max_staleness": 1,
        "checkpoint_every": 2,
        "validate_every": 2,
    }
    return RunDraft(
        name="projects/default/trainingRuns/small",
        project="projects/default",
        display_name="",
        algorithm="grpo",
        settings_json=json.dumps(settings),
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source=str(model)),
        inputs={
            "agent": "resources/agent.solver/versions/1",
            "train_tasks": "resources/dataset.train/versions/1",
            "validation_tasks": "resources/dataset.validation/versions/1",
        },
    )


@pytest.fixture
def sft_draft(grpo_draft: RunDraft) -> RunDraft:
    return replace(
        grpo_draft,
        algorithm="sft",
        settings_json=json.dumps({"steps": 4, "batch_size": 2, "checkpoint_every": 2, "report_every": 1}),
        inputs={"demonstrations": "resources/dataset.demonstrations/versions/1"},
    )


def with_settings(draft: RunDraft, *, algorithm: str = "", validated: bool = True, **settings: object) -> RunDraft:
    """Changes settings of a run, and leaves those out that are None; without validation it has no validation tasks."""
    inputs = {use: name for use, name in draft.inputs.items() if validated or use != "validation_tasks"}
    merged = {**json.loads(draft.settings_json), **settings}
    text = json.dumps({name: value for name, value in merged.items() if value is not None})
    return replace(draft, algorithm=algorithm or draft.algorithm, settings_json=text, inputs=inputs)


async def created(draft: RunDraft, world: World, **allowed: Any) -> TrainingRun:
    """Checks a draft against a world; `allowed` are the addresses that the operator names."""
    [run] = await created_stages([draft], world, **allowed)
    return run


async def created_stages(drafts: Sequence[RunDraft], world: World, **allowed: Any) -> list[TrainingRun]:
    """Checks the stages of a training against a world; see `created`."""
    rules = CreationRules(registry=ALGORITHMS, **allowed)
    return await checked_runs(drafts, rules=rules, resources=ModelResources(world), now=now())


LONGEST_RUN_S = 60


async def live(service: Service, run: TrainingRun, crashes: Crashes, *, limit_s: float = LONGEST_RUN_S) -> bool:
    """Lets the service work until the run is final; returns False if the process was killed before."""
    work = asyncio.create_task(service.worker.run())
    ended = asyncio.create_task(service.runs.wait_final(run.name, timeout_s=limit_s))
    killed = asyncio.create_task(crashes.killed.wait())
    try:
        await asyncio.wait({work, ended, killed}, return_when=asyncio.FIRST_COMPLETED)
        return not killed.done()
    finally:
        for task in (work, ended, killed):
            task.cancel()
        await asyncio.gather(work, ended, killed, return_exceptions=True)
        service.close()


def check(tmp_path: Path, world: World) -> None:
    """Compares the run's books with what the world has delivered."""
    check_books(read_consumed(run_folder(tmp_path)), [g.group_id for g in world.feed], steps=4)


WAIT_S = 30


@pytest.fixture
async def service(world: World, open_service: Callable[[World], Service]) -> AsyncIterator[Service]:
    """Yields a service that works over the world."""
    async with working(open_service(world)) as service:
        yield service


@asynccontextmanager
async def working(service: Service) -> AsyncIterator[Service]:
    task = asyncio.create_task(service.worker.run())
    try:
        yield service
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        service.close()


async def until(service: Service, name: str, state: RunState) -> TrainingRun:
    """Waits for an event that says that a run is in a state."""
    async with asyncio.timeout(WAIT_S):
        async for event in service.runs.entry(name).events.follow(0):
            if event.run is not None and event.run.state is state:
                return service.runs.entry(name).run
    raise AssertionError(f"the run never became {state}")


async def follow(log: EventLog, after: int) -> list[Event]:
    """Collects events until the log closes."""
    async with asyncio.timeout(10):
        return [event async for event in log.follow(after)]


def checkpoints(service: Service, run: TrainingRun) -> list[Checkpoint]:
    """Lists the checkpoints that a run can be put back to, oldest first."""
    found = service.folder.run_files(run).checkpoint_store().listed()
    return [each for each in found if own_past(service.runs.entry(run.name).run, each)]


def rollback(service: Service, run: TrainingRun, target: Checkpoint) -> TrainingRun:
    return service.runs.rollback(run.name, sequence=target.sequence, step=int(target.progress["step"]))


POLICY = "resources/policy.tiny"


def descriptions(world: World) -> list[dict[str, object]]:
    return [json.loads(content) for content in world.resources[POLICY]]


def kills(chance: random.Random, *, calls: int, lives: int = 3) -> Iterator[Crashes]:
    """Yields where so many lives of the service end: before or after one of their first calls."""
    for _ in range(lives):
        yield Crashes(at_call=chance.randrange(1, calls), after_effect=chance.random() < 0.5)


CarryOut = Callable[..., Awaitable[Entry]]


@pytest.fixture
def carry_out(world: World, open_service: Callable[[World], Service]) -> CarryOut:
    """Returns `carried_out` for the world of the test."""
    return partial(carried_out, world=world, open_service=open_service)


async def carried_out(
    draft: RunDraft,
    *,
    world: World,
    open_service: Callable[[World], Service],
    killed: Iterable[Crashes] = (),
    state: RunState = RunState.SUCCEEDED,
) -> Entry:
    """Carries a run out; returns its entry at the end.

    Args:
        draft: The run.
        killed: Where each life of the service but the last one ends, unless the run ends before.
        state: The state that it must end in.
    """
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    for crashes in chain(killed, [Crashes()]):
        world.new_life(crashes)
        if await live(service, run, crashes):
            break
        service = open_service(world)
    entry = service.runs.entry(run.name)
    assert entry.run.state is state, entry.run.failure_message
    return entry


def notices(entry: Entry) -> list[str]:
    return [notice.message for notice in entry.events.notices()]


def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "state/runs/default/small"


def run_journal(tmp_path: Path) -> Path:
    """Returns the newest journal of the run."""
    return RunFiles(run_folder(tmp_path)).journal
