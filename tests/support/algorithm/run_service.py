"""A tiny model on disk, and runs over a model of the other services."""

import asyncio
import importlib.util
import json
import random
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.persistence.state_folder import StateFolder
from fulmen_algorithm.policy.trainer import OpenTrainer
from fulmen_algorithm.runs.creation import CreationRules, RunDraft, checked_run
from fulmen_algorithm.runs.events import Event, EventLog
from fulmen_algorithm.runs.execution import Connections, RunExecutor
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState, TrainingRun
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.training.checkpoints import Checkpoint, CheckpointStore
from fulmen_algorithm.transport.training_runs import own_past
from tests.support.algorithm.model_services import (
    Crashes,
    ModelChat,
    ModelQueue,
    ModelResources,
    ModelServing,
    World,
    no_build,
)
from tests.support.training import check_books, read_consumed

ALGORITHMS = load_registry([Path(__file__).parents[3] / "examples/best_of_n/algorithm.py"])


def now() -> datetime:
    """Returns the time."""
    return datetime.now(UTC)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, repository_root: Path) -> Path:
    """Builds the arithmetic example's model as small as it gets."""
    path = repository_root / "examples/arithmetic/make_model.py"
    spec = importlib.util.spec_from_file_location("arithmetic_make_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("tiny")
    module.build(str(folder), 0, hidden=16, layers=1, heads=2, mlp=16)
    return folder


@dataclass(kw_only=True)
class Service:
    """One life of the service's inside."""

    runs: RunRegistry
    worker: RunWorker
    torch_thread: TorchThread
    threads: ThreadPoolExecutor
    """Where `asyncio.to_thread` works in this life."""
    folder: StateFolder

    def close(self) -> None:
        """Ends it, as its process would: no thread of it works on beside the next life."""
        self.torch_thread.close()
        self.threads.shutdown(cancel_futures=True)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        self.folder.__exit__(None, None, None)


def service_at(state: Path, world: World, open_trainer: OpenTrainer | None = None) -> Service:
    """Starts the service's inside over a world."""
    folder = StateFolder(state).__enter__()
    runs = RunRegistry(open_file=folder.run_files, clock=now, max_concurrent=2)
    for run, files in folder.runs():
        runs.restore(run, files)
    torch_thread, threads = TorchThread(torch_threads=1), ThreadPoolExecutor()
    asyncio.get_running_loop().set_default_executor(threads)
    executor = RunExecutor(
        registry=ALGORITHMS,
        runs=runs,
        connections=Connections(
            queue=lambda run, settings, notify: ModelQueue(world.of(run)),
            resources=lambda project, notify: ModelResources(world),
            serving=lambda run, settings, notify: ModelServing(world.of(run)),
            chat=lambda notify: ModelChat(world),
            open_trainer=open_trainer
            or (lambda setup: InProcessTrainer.open(setup, thread=torch_thread, device="cpu")),
            build_model=no_build,
        ),
        open_folder=folder.run_files,
        keep_checkpoints=2,
        keep_models=2,
        machine={"device": "cpu"},
    )
    worker = RunWorker(runs, executor)
    return Service(runs=runs, worker=worker, torch_thread=torch_thread, threads=threads, folder=folder)


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
    """Returns a world."""
    return made_world()


@pytest.fixture
def grpo_draft(tiny_model: Path) -> RunDraft:
    """Returns a small GRPO run."""
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
        name="trainingRuns/small",
        project="projects/default",
        display_name="",
        algorithm="grpo",
        settings_json=json.dumps(settings),
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source=str(tiny_model)),
        inputs={
            "agent": "resources/agent.solver/versions/1",
            "train_tasks": "resources/dataset.train/versions/1",
            "validation_tasks": "resources/dataset.validation/versions/1",
        },
    )


@pytest.fixture
def sft_draft(grpo_draft: RunDraft) -> RunDraft:
    """Returns a small SFT run."""
    return replace(
        grpo_draft,
        algorithm="sft",
        settings_json=json.dumps({"steps": 4, "batch_size": 2, "checkpoint_every": 2, "report_every": 1}),
        inputs={"demonstrations": "resources/dataset.demonstrations/versions/1"},
    )


async def created(draft: RunDraft, world: World, **allowed: Collection[str]) -> TrainingRun:
    """Checks a draft against a world; `allowed` are the addresses that the operator names."""
    rules = CreationRules(registry=ALGORITHMS, **allowed)
    return await checked_run(draft, rules=rules, resources=ModelResources(world), now=now())


LONGEST_RUN_S = 60


async def live(service: Service, run: TrainingRun, crashes: Crashes) -> bool:
    """Lets the service work until the run is final; returns False if the process was killed before."""
    work = asyncio.create_task(service.worker.run())
    ended = asyncio.create_task(service.runs.wait_final(run.name, timeout_s=LONGEST_RUN_S))
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
    check_books(read_consumed(tmp_path / "state/runs/small"), [g.group_id for g in world.feed], steps=4)


WAIT_S = 30


@asynccontextmanager
async def working(service: Service) -> AsyncIterator[Service]:
    """Lets the service work."""
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
    found = CheckpointStore(directory=service.folder.run_files(run.run_id).checkpoints).listed()
    return [each for each in found if own_past(service.runs.entry(run.name).run, each)]


def rollback(service: Service, run: TrainingRun, target: Checkpoint) -> TrainingRun:
    """Puts a run back."""
    return service.runs.rollback(run.name, sequence=target.sequence, step=int(target.progress["step"]))


POLICY = "resources/policy.tiny"


def with_settings(draft: RunDraft, **settings: object) -> RunDraft:
    """Changes settings of a run."""
    # Of a model this small a delta pays only where little moves.
    settings = {"learning_rate": 1e-6, **settings}
    return replace(draft, settings_json=json.dumps({**json.loads(draft.settings_json), **settings}))


def descriptions(world: World) -> list[dict[str, object]]:
    """Returns what the versions say of themselves."""
    return [json.loads(content) for content in world.resources[POLICY]]


async def carried_out(
    draft: RunDraft, world: World, open_service: Callable[[World], Service], *, crashes: int = 0
) -> TrainingRun:
    """Carries a run out, killed some times; returns it at its end."""
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    for number in range(crashes + 1):
        at = world.chance.randrange(5, 30) if number < crashes else None
        world.crashes = Crashes(at_call=at, after_effect=world.chance.random() < 0.5)
        if await live(service, run, world.crashes):
            break
        service = open_service(world)
    return service.runs.entry(run.name).run
