"""Runs are named and tagged at any time, whatever their state."""

from typing import cast

import grpc.aio
import pytest

from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen.errors import ArgumentInvalid
from fulmen_algorithm.runs.creation.rules import CreationRules
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_service_kit.security.auth import set_caller
from fulmen_service_kit.security.tokens import Caller, Role
from tests.support.algorithm.new_run import now, training_run
from tests.support.algorithm.run_service import ALGORITHMS

NO_CONTEXT = cast(grpc.aio.ServicerContext, None)


def request(**fields: object) -> pb.UpdateTrainingRunRequest:
    return pb.UpdateTrainingRunRequest(name=training_run().name, **fields)  # type: ignore[arg-type]


async def test_an_ended_run_gets_a_name_and_tags_that_are_stored(world, open_service):
    service = open_service(world)
    await service.ownership.create(training_run())
    service.runs.add(training_run())
    service.runs.move(training_run().name, RunState.CANCELLED)
    servicer = TrainingRunServicer(
        runs=service.runs,
        worker=service.worker,
        connections=service.connections,
        clock=now,
        rules=CreationRules(registry=ALGORITHMS),
        ownership=service.ownership,
        forwarding=Forwarding(None, lambda: ""),
    )
    set_caller(Caller(role=Role.CLIENT))
    named = await servicer.UpdateTrainingRun(
        request(display_name="The long one", tags=pb.TagList(values=["paper", "best", "best"])), NO_CONTEXT
    )
    assert (named.training_run.display_name, list(named.training_run.tags)) == ("The long one", ["best", "paper"])
    tagged = await servicer.UpdateTrainingRun(request(tags=pb.TagList()), NO_CONTEXT)
    assert (tagged.training_run.display_name, list(tagged.training_run.tags)) == ("The long one", [])
    with pytest.raises(ArgumentInvalid) as refused:
        await servicer.UpdateTrainingRun(
            request(display_name="x" * 129, tags=pb.TagList(values=["No!", *map(str, range(16))])), NO_CONTEXT
        )
    assert [each.field for each in refused.value.violations] == ["display_name", "tags", "tags"]
    stored = service.runs.entry(training_run().name).files.load_run()
    assert stored is not None
    assert stored.display_name == "The long one"
    service.close()
