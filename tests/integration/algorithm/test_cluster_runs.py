"""A run whose ranks or engines are on a cluster, through all services: planned, placed, and going on when a node is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1.training_run_service_pb2 import CancelTrainingRunRequest
from fulmen.errors import FulmenError
from fulmen.rpc.services import connect
from fulmen.store.v1.rollout_pb2 import ROLLOUT_STATE_SUCCEEDED
from tests.support.algorithm import fake_slurm
from tests.support.algorithm.clusters import ENVIRONMENT, kubernetes_settings
from tests.support.algorithm.module_processes import ENGINE, RANK
from tests.support.algorithm.runs import list_rollouts
from tests.support.algorithm.small_training import SETTINGS, STEPS, start_run
from tests.support.algorithm.training import check_books, finished_groups, read_consumed
from tests.support.kubernetes.serve import kubernetes_cluster
from tests.support.processes import none_holds
from tests.support.stack import running_stack, stack_targets

AGENT = "fulmen_algorithm.weight_agent.on_cluster"
REPLICAS = 2
ENDLESS = 10_000

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(600)]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A cluster with two nodes of two CPUs.

    Attributes:
        settings: Those of the cluster.
        environment: Variables that the service needs.
        mark: A variable of all that it runs, and its value.
    """

    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    mark: tuple[str, str]


@pytest.fixture(params=["slurm", "kubernetes"])
def engine(request: pytest.FixtureRequest, short_tmp_path: Path) -> Iterator[Engine]:
    if request.param == "slurm":
        shared = short_tmp_path / "shared"
        shared.mkdir()
        slurm = fake_slurm.install(short_tmp_path)
        settings = {"kind": "slurm", "folder": str(shared), "python": sys.executable, "poll_s": 0.5}
        yield Engine(settings=settings, environment=slurm, mark=("FAKE_SLURM", slurm["FAKE_SLURM"]))
        return
    mark = ("IMAGE_OF_TESTS", str(short_tmp_path))
    with kubernetes_cluster(short_tmp_path, {**ENVIRONMENT, mark[0]: mark[1]}) as kubeconfig:
        settings = kubernetes_settings(kubeconfig=str(kubeconfig)).model_dump(mode="json")
        yield Engine(settings=settings, environment={}, mark=mark)


def placed_on(engine: Engine, module: str) -> list[psutil.Process]:
    """Returns the processes of a module that a cluster runs, whoever their parents are."""
    name, value = engine.mark
    found = []
    for process in psutil.process_iter():
        try:
            if module in process.cmdline() and process.environ().get(name) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def test_a_run_on_a_cluster_resumes_when_a_node_is_killed(engine: Engine, short_tmp_path: Path, repository_root):
    environment = {
        **engine.environment,
        "FULMEN_ALGORITHM_CLUSTERS": json.dumps({"hpc": engine.settings}),
        "FULMEN_ALGORITHM_CLUSTER_SILENCE_S": "10",
    }
    parallel = {"kind": "ddp", "ranks": 2, "cluster": "hpc", "affinity": "own_nodes"}
    async with (
        running_stack(short_tmp_path / "stack", environment=environment) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        for wrong, reason in (
            (
                {**parallel, "cluster": "another"},
                "'another' is not in the service's setting FULMEN_ALGORITHM_CLUSTERS (hpc;",
            ),
            (
                {**parallel, "cluster": "local"},
                "'local' is not in the service's setting FULMEN_ALGORITHM_CLUSTERS (hpc;",
            ),
        ):
            with pytest.raises(FulmenError) as refused:
                await start_run(stack, client, repository_root, "refused", settings={**SETTINGS, "parallel": wrong})
            assert reason in str(refused.value)
        big = await start_run(
            stack,
            client,
            repository_root,
            "big",
            settings={**SETTINGS, "parallel": {**parallel, "cpus": 3, "ranks": 4}},
        )
        ended = await big.end()
        assert ended.state == pb.TRAINING_RUN_STATE_FAILED
        assert "a process asks for 3 CPUs, but the largest node has 2; 4 nodes are requested" in ended.failure_message

        watcher = await start_run(stack, client, repository_root, "far", settings={**SETTINGS, "parallel": parallel})
        await watcher.until_notice("Placement on cluster 'hpc': 2 processes: 1 on node-a, 1 on node-b.")
        await watcher.until_step(2)
        lost = placed_on(engine, RANK)
        assert len(lost) == 2
        guardian = lost[1].parent()
        assert guardian is not None
        os.kill(guardian.pid, signal.SIGKILL)
        await watcher.until_notice("Resuming from the checkpoint of step")
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        check_books(
            read_consumed(short_tmp_path / "stack/algorithm/runs/default/far"),
            await finished_groups(client, run.name),
            steps=STEPS,
        )
    await none_holds("=".join(engine.mark))


async def test_an_engine_that_a_cluster_loses_is_started_again_and_no_call_fails(
    engine: Engine, short_tmp_path: Path, repository_root
):
    environment = {
        **engine.environment,
        "FULMEN_ALGORITHM_CLUSTERS": json.dumps({"hpc": engine.settings}),
        "FULMEN_ALGORITHM_CLUSTER_SILENCE_S": "10",
    }
    served = {"kind": "embedded", "replicas": REPLICAS, "cluster": "hpc"}
    async with (
        running_stack(short_tmp_path / "stack", environment=environment) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        for wrong, reason in (
            ({**served, "cluster": "another"}, "settings.engine.cluster: 'another' is not in the service's setting"),
            ({**served, "gpus": [0, 1]}, "a list names GPUs of the service's machine"),
        ):
            with pytest.raises(FulmenError) as refused:
                await start_run(stack, client, repository_root, "refused", settings={**SETTINGS, "engine": wrong})
            assert reason in str(refused.value)
        wide = await start_run(
            stack, client, repository_root, "wide", settings={**SETTINGS, "engine": {**served, "gpus": 3}}
        )
        ended = await wide.end()
        assert ended.state == pb.TRAINING_RUN_STATE_FAILED
        assert "The engines do not fit cluster 'hpc': a process asks for 3 GPUs" in ended.failure_message

        settings = {**SETTINGS, "engine": served, "steps": ENDLESS, "weights": {"kind": "delta"}}
        watcher = await start_run(stack, client, repository_root, "far", settings=settings)
        await watcher.until_notice("Placement of engines on cluster 'hpc': 2 processes: ")
        await watcher.until_step(2)
        agents = placed_on(engine, AGENT)
        assert len(agents) == len(placed_on(engine, ENGINE)) == REPLICAS
        # No argument, and so no token.
        assert {tuple(agent.cmdline()[-2:]) for agent in agents} == {("-m", AGENT)}
        guardian = agents[0].parent()
        assert guardian is not None
        os.kill(guardian.pid, signal.SIGKILL)
        await watcher.until_notice("is restarted. It ended")
        await watcher.until_notice("has joined from")
        await watcher.until_step(1)
        await client.training_runs.CancelTrainingRun(CancelTrainingRunRequest(name="projects/default/trainingRuns/far"))
        run = await watcher.end()
        consumed = read_consumed(short_tmp_path / "stack/algorithm/runs/default/far")
        check_books(consumed, await finished_groups(client, run.name), steps=consumed[-1]["step"])
        rollouts = await list_rollouts(client, training_run=run.name)
        assert rollouts
        assert {rollout.ended_attempt_count for rollout in rollouts if rollout.state == ROLLOUT_STATE_SUCCEEDED} == {
            1
        }, "a call has failed"
    await none_holds("=".join(engine.mark))
