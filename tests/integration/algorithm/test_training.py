"""Training for real: a tiny model, the real store, proxy, runner and engine, and processes that are killed."""

import asyncio
from pathlib import Path

import psutil
import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.rpc.services import connect
from tests.support.algorithm.module_processes import RANK, processes_of
from tests.support.algorithm.small_training import SETTINGS, STEPS, WAIT_S, start_run
from tests.support.algorithm.training import (
    check_books,
    finished_groups,
    read_consumed,
)
from tests.support.stack import running_stack, stack_targets

pytestmark = [
    pytest.mark.long,
    pytest.mark.serial,
    pytest.mark.timeout(420),
]

RANKS = 2


def check_ended(group: list[psutil.Process]) -> None:
    """Checks that every process of a group of ranks ends."""
    assert len(group) == RANKS
    _, left = psutil.wait_procs(group, timeout=WAIT_S)
    assert left == []


async def test_a_run_in_ranks_survives_outages_of_store_proxy_and_its_own_service(short_tmp_path, repository_root):
    settings = {**SETTINGS, "parallel": {"kind": "ddp", "ranks": RANKS}}
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watcher = await start_run(stack, client, repository_root, "outages", settings=settings)
        await watcher.until_step(1)
        await stack.kill_service("store")
        await watcher.until_notice("The store does not answer")
        await stack.start_service("store")
        await watcher.until_notice("The store answers again")
        await stack.kill_service("llm_proxy")
        await stack.start_service("llm_proxy")
        await watcher.until_step(3)
        first = processes_of(RANK)
        await stack.kill_service("algorithm")
        await asyncio.to_thread(check_ended, first)
        await stack.start_service("algorithm")
        await watcher.until_notice("Resuming from the checkpoint of step")
        second = processes_of(RANK)
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        await asyncio.to_thread(check_ended, second)
        assert (Path(run.model_path) / "model.safetensors").exists()
        assert int(run.policy_version.rpartition("/")[2]) > STEPS
        check_books(
            read_consumed(short_tmp_path / "algorithm/runs/default/outages"),
            await finished_groups(client, run.name),
            steps=STEPS,
        )
