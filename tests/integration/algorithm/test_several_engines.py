"""A run with several engines in a whole deployment: one is killed, and no rollout is lost."""

from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.rpc.services import connect
from tests.support.algorithm.module_processes import ENGINE, processes_of
from tests.support.algorithm.small_training import SETTINGS, STEPS, start_run
from tests.support.algorithm.training import check_books, finished_groups, read_consumed
from tests.support.stack import running_stack, stack_targets

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(420)]

REPLICAS = 2


async def test_a_run_goes_on_when_one_of_its_engines_is_killed(short_tmp_path: Path, repository_root: Path) -> None:
    settings = {**SETTINGS, "engine": {"kind": "embedded", "replicas": REPLICAS}}
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watcher = await start_run(stack, client, repository_root, "several", settings=settings)
        await watcher.until_step(1)
        request = service_pb.GetTrainingRunRequest(name="projects/default/trainingRuns/several")
        run = (await client.training_runs.GetTrainingRun(request)).training_run
        assert (run.engine_count, run.ready_engine_count) == (REPLICAS, REPLICAS)
        engines = processes_of(ENGINE)
        assert len(engines) == REPLICAS
        engines[0].kill()
        await watcher.until_notice("is restarted")
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        check_books(
            read_consumed(short_tmp_path / "algorithm/runs/default/several"),
            await finished_groups(client, run.name),
            steps=STEPS,
        )
