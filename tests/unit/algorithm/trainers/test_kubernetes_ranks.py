"""Ranks in pods: when one pod is lost, those that are left hand the state over, and no step is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.kubernetes.launcher import KubernetesLauncher
from fulmen_algorithm.policy.trainer import Trainer
from fulmen_algorithm.trainers.elastic import ElasticTrainer
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepSettings
from tests.support.algorithm.clusters import ENVIRONMENT, kubernetes_settings, remote
from tests.support.algorithm.trainers import model_dir, rows, setup_of
from tests.support.algorithm.warm import here
from tests.support.kubernetes.api import KubernetesApi
from tests.support.kubernetes.nodes import node_document

__all__ = ["model_dir", "rows"]

pytestmark = [pytest.mark.xdist_group("clusters"), pytest.mark.timeout(300)]

STEP = StepSettings(token_budget=64, planned_steps=0, total_steps=20)
ELASTIC = Ddp(ranks=2, min_ranks=1, cpus=2)
"""A rank on each of two nodes with two CPUs; one is enough."""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    nodes = [node_document(name, cpu="2", memory="64Gi") for name in ("node-a", "node-b")]
    api = KubernetesApi(tmp_path, nodes, ENVIRONMENT)
    await api.start()
    yield api
    await api.close()


async def train(trainer: Trainer, rows: list[Row], *, step: int) -> list[float]:
    placed, batch = replace(STEP, planned_steps=2 * step), BatchSettings(minibatches=2)
    results = await trainer.train(rows, settings=placed, batch=batch, seed=step, current_version=3)
    return [result.loss for result in results]


@pytest.mark.long
async def test_the_ranks_that_are_left_when_a_pod_is_killed_go_on_and_lose_no_step(api, model_dir, rows, tmp_path):
    gate = Gate(GateOptions(silence_s=20.0))
    cluster = remote(KubernetesLauncher(kubernetes_settings(kubeconfig=str(api.kubeconfig()))), gate)
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=ELASTIC)), run_dir=tmp_path)
    notices: list[str] = []
    trainer = await ElasticTrainer.open(
        setup, GroupOptions(cluster=cluster), notify=lambda severity, text: notices.append(text)
    )
    losses = [await train(trainer, rows, step=0)]
    guardian = psutil.Process(trainer.group.pids[1]).parent()
    assert guardian is not None
    os.kill(guardian.pid, signal.SIGKILL)
    await api.until(lambda: sorted(pod["status"]["phase"] for pod in api.pods.values()) == ["Failed", "Running"])
    losses += [await train(trainer, rows, step=step) for step in (1, 2)]
    await trainer.close()
    await api.until(lambda: not api.jobs and not api.pods)
    gate.close()
    assert len(notices) == 1
    assert notices[0].endswith("No step is lost: continuing with 1 of 2 ranks.")
    whole = await RankGroupTrainer.open(
        setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), GroupOptions(cluster=here())
    )
    for step, found in enumerate(losses):
        assert found == pytest.approx(await train(whole, rows, step=step), abs=2e-6)
    await whole.close()
