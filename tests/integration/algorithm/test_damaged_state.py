"""Files of a run or a model that are damaged hold up no other, and no start of the service."""

from __future__ import annotations

from pathlib import Path

from fulmen.algorithm.v1 import training_run_service_pb2 as runs_pb
from fulmen.algorithm.v1 import training_run_service_pb2_grpc as runs_rpc
from fulmen.algorithm.v1 import weight_service_pb2 as weights_pb
from fulmen.algorithm.v1 import weight_service_pb2_grpc as weights_rpc
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.models.model_store import RECORD
from fulmen_algorithm.persistence.run_files import encoded_run
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.ports import RunRecord
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicySpec, RunState
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.new_run import now, training_run
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle

DEADLINE_S = 30
DIGEST = "ab" * 32
NAMES = ("a-whole", "b-no-run", "c-no-events", "d-no-last-event", "e-whole")


async def stored_runs(store: StoreHandle, state: Path) -> None:
    """Stores runs that an earlier process has paused or ended, each with a measured step."""
    with RunStorage(state) as storage:
        registry = RunRegistry(storage, clock=now)
        for name in NAMES:
            run = training_run(name=f"projects/default/trainingRuns/{name}", policy=PolicySpec(name=name))
            registry.add(run)
            registry.move(run.name, RunState.RUNNING)
            registry.entry(run.name).events.step_done(StepMetrics(step=1, values={"loss": 1.0}))
            registry.move(run.name, RunState.PAUSED if name == "c-no-events" else RunState.SUCCEEDED)
            record = RunRecord(training_run=run.name, policy=name, record=encoded_run(registry.entry(run.name).run))
            async with open_channel(store.target, token=store.token(Role.SERVICE)) as channel:
                leases = StoreRunLeases(
                    channel, owner=storage.owner, storage=storage.storage_id, address=lambda: "", ttl_s=60
                )
                await leases.create([record], request_id=name)


def damage(state: Path) -> None:
    """Damages files as a failing disk does."""
    [run] = state.glob("runs/default/b-no-run/**/run.json")
    run.write_bytes(run.read_bytes()[:-20] + b"\0" * 20)
    [events] = state.glob("runs/default/c-no-events/**/events.jsonl")
    events.write_bytes(b"\0" * 20 + events.read_bytes()[20:])
    [events] = state.glob("runs/default/d-no-last-event/**/events.jsonl")
    events.write_bytes(events.read_bytes() + b"{\n")
    for digest in (DIGEST, DIGEST[::-1]):
        record = state / "models/default" / digest / RECORD
        record.parent.mkdir(parents=True)
        record.write_text('{"files": [], "created_s": 1}' if digest == DIGEST else '{"files": [{"pa')


async def test_a_service_starts_and_serves_what_is_whole(store: StoreHandle, tmp_path: Path) -> None:
    state = tmp_path / "state"
    await stored_runs(store, state)
    damage(state)
    async with serving(
        "algorithm", store, tmp_path, roles=True, upload_keep_s=1e9, metric_sinks="tensorboard"
    ) as parts:
        async with open_channel(target_of(parts), token=store.token(Role.CLIENT)) as channel:
            listed = await runs_rpc.TrainingRunServiceStub(channel).ListTrainingRuns(runs_pb.ListTrainingRunsRequest())
            models = await weights_rpc.WeightServiceStub(channel).ListModels(weights_pb.ListModelsRequest())
        assert sorted(run.name.rpartition("/")[2] for run in listed.training_runs) == ["a-whole", "e-whole"]
        assert [model.name.rpartition("/")[2] for model in models.models] == [DIGEST]
        await parts.drain()
