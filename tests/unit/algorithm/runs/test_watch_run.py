"""A cancelled watch of a run does not wait for the next event."""

import asyncio
from typing import cast

import grpc.aio

from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.creation.rules import CreationRules
from fulmen_algorithm.runs.execution import Connections
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_service_kit.security.auth import set_caller
from fulmen_service_kit.security.tokens import Caller, Role
from tests.support.algorithm.new_run import now, training_run
from tests.support.algorithm.run_service import ALGORITHMS


async def test_a_watch_that_is_cancelled_leaves_no_task_behind(tmp_path, world):
    runs = RunRegistry(RunStorage(tmp_path), clock=now)
    runs.add(training_run())
    servicer = TrainingRunServicer(
        runs=runs,
        worker=cast(RunWorker, None),
        connections=cast(Connections, None),
        clock=now,
        rules=CreationRules(registry=ALGORITHMS),
        ownership=cast(RunOwnership, None),
        forwarding=Forwarding(None, lambda: ""),
    )
    set_caller(Caller(role=Role.CLIENT))
    before = asyncio.all_tasks()
    told = asyncio.Event()

    async def watch() -> None:
        context = cast(grpc.aio.ServicerContext, None)
        async for _ in servicer.WatchTrainingRun(pb.WatchTrainingRunRequest(name=training_run().name), context):
            told.set()

    watching = asyncio.create_task(watch())
    await told.wait()
    await asyncio.sleep(0)  # it waits for the next event now
    watching.cancel()
    await asyncio.wait({watching})
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
