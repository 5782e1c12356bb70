"""Who watches a run and leaves is not kept waiting for its next event."""

import asyncio
from pathlib import Path
from typing import cast

import grpc.aio

from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.creation import CreationRules
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicySpec, TrainingRun
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_service_kit.auth import set_caller
from fulmen_service_kit.tokens import Caller, Role
from tests.support.algorithm.model_services import ModelResources, World
from tests.support.algorithm.run_service import ALGORITHMS, now

NAME = "trainingRuns/watched"


async def test_a_watch_that_is_left_leaves_nothing_behind(tmp_path: Path, world: World) -> None:
    runs = RunRegistry(open_file=lambda run_id: RunFiles(tmp_path / run_id), clock=now)
    policy = PolicySpec(name="watched")
    runs.add(
        TrainingRun(
            name=NAME,
            project="projects/default",
            display_name="",
            algorithm="grpo",
            settings_json="{}",
            policy=policy,
            inputs={},
            create_time=now(),
        )
    )
    servicer = TrainingRunServicer(
        runs=runs,
        worker=cast(RunWorker, None),
        resources=lambda project, notify: ModelResources(world),
        open_files=lambda run_id: RunFiles(tmp_path / run_id),
        clock=now,
        rules=CreationRules(registry=ALGORITHMS),
    )
    set_caller(Caller(role=Role.CLIENT))
    before = asyncio.all_tasks()
    told = asyncio.Event()

    async def watch() -> None:
        context = cast(grpc.aio.ServicerContext, None)
        async for _ in servicer.WatchTrainingRun(pb.WatchTrainingRunRequest(name=NAME), context):
            told.set()

    watching = asyncio.create_task(watch())
    await told.wait()
    await asyncio.sleep(0)  # it waits for the next event now
    watching.cancel()
    await asyncio.wait({watching})
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
