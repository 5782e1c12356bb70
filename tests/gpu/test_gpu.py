"""What only a GPU shows: bf16 by default, NCCL, sharding on the device. `make test-gpu`; skipped where there is none."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fulmen_algorithm.cluster.gpus.machine import NvidiaSmi
from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.losses.objectives import LossKl, Objective
from fulmen_algorithm.policy.trainer import Trainer
from fulmen_algorithm.trainers.elastic import ElasticTrainer
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2, OneProcess, Precision, shown_gpus
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepSettings
from tests.support.algorithm.trainers import model_dir, rows, setup_of

__all__ = ["model_dir", "rows"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]

STEP = StepSettings(token_budget=64)
GROUPS = {
    "ddp": ComputeSettings(parallel=Ddp(ranks=1)),
    "fsdp2": ComputeSettings(parallel=Fsdp2(ranks=1), gradient_checkpointing=True),
}


async def losses(trainer: Trainer, rows: list[Row]) -> list[float]:
    """Takes three steps."""
    results = []
    for step in range(3):
        results += await trainer.train(rows, settings=STEP, batch=BatchSettings(), seed=step, current_version=3)
    assert not any(result.skipped for result in results)
    return [result.loss for result in results]


async def on_cpu(model_dir: Path, rows: list[Row]) -> list[float]:
    """Takes the steps where every other test takes them."""
    thread = TorchThread(torch_threads=1)
    trainer = await InProcessTrainer.open(setup_of(model_dir, ComputeSettings()), thread=thread, device="cpu")
    found = await losses(trainer, rows)
    thread.close()
    return found


async def test_float32_on_a_gpu_gives_the_losses_of_a_cpu(model_dir: Path, rows: list[Row]) -> None:
    thread = TorchThread(torch_threads=1)
    setup = setup_of(model_dir, ComputeSettings(precision=Precision.FP32))
    trainer = await InProcessTrainer.open(setup, thread=thread, device="cuda")
    assert await losses(trainer, rows) == pytest.approx(await on_cpu(model_dir, rows), abs=1e-4)
    thread.close()


async def test_a_gpu_computes_in_bf16_unless_told_otherwise(model_dir: Path, rows: list[Row]) -> None:
    thread = TorchThread(torch_threads=1)
    trainer = await InProcessTrainer.open(setup_of(model_dir, ComputeSettings()), thread=thread, device="cuda")
    found, exact = await losses(trainer, rows), await on_cpu(model_dir, rows)
    assert found == pytest.approx(exact, abs=0.05)
    assert found != pytest.approx(exact, abs=1e-6)
    thread.close()


@pytest.mark.parametrize("kind", list(GROUPS))
async def test_a_group_of_one_gpu_trains_publishes_and_goes_on(
    kind: str, model_dir: Path, rows: list[Row], tmp_path: Path
) -> None:
    exact = GROUPS[kind].model_copy(update={"precision": Precision.FP32})
    trainer = await RankGroupTrainer.open(setup_of(model_dir, exact), GroupOptions(device="cuda"))
    try:
        assert await losses(trainer, rows) == pytest.approx(await on_cpu(model_dir, rows), abs=1e-4)
        await trainer.write_state(tmp_path)
        before = await trainer.logprobs(rows, settings=STEP)
        await losses(trainer, rows)
        await trainer.read_state(tmp_path)
        assert await trainer.logprobs(rows, settings=STEP) == before
        PolicyModel.load(tmp_path / "model")
    finally:
        await trainer.close()


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="torch finds fewer than 3 GPUs")
@pytest.mark.parametrize("kind", ["none", "ddp"])
async def test_reference_and_critic_on_gpus_of_their_own_change_no_number(
    kind: str, model_dir: Path, rows: list[Row]
) -> None:
    rewarded = [replace(row, rewards=tuple(float(trains) for trains in row.loss_mask)) for row in rows]
    step, found = replace(STEP, objective=Objective(kl=LossKl(coefficient=0.1))), []
    for beside in ({}, {"reference_gpus": [1], "critic_gpus": [2]}):
        parallel = OneProcess(gpus=[0], **beside) if kind == "none" else Ddp(ranks=1, gpus=[0], **beside)
        compute = ComputeSettings(parallel=parallel, precision=Precision.FP32)
        setup = replace(setup_of(model_dir, compute), critic=CriticPlan())
        thread = TorchThread(torch_threads=1)
        if kind == "none":
            trainer = await InProcessTrainer.open(setup, thread=thread, device="cuda")
        else:
            trainer = await RankGroupTrainer.open(setup, GroupOptions(device="cuda", gpus=shown_gpus(parallel)))
        results = []
        for seed in range(3):
            results += await trainer.train(
                rewarded, settings=step, batch=BatchSettings(minibatches=1), seed=seed, current_version=3
            )
        found.append([(each.loss, each.metrics["value_loss"]) for each in results])
        found.append(await trainer.reference_logprobs(rewarded, settings=step))
        await trainer.close()
        thread.close()
    assert found[2] == [pytest.approx(each, abs=1e-5) for each in found[0]]
    assert found[3] == [pytest.approx(each, abs=1e-5) for each in found[1]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than 2 GPUs")
@pytest.mark.parametrize("split", [{"tensor": 2}, {"context": 2}], ids=["matrices", "rows"])
async def test_what_is_split_over_two_gpus_gives_the_losses_of_a_cpu(
    split: dict[str, int], model_dir: Path, rows: list[Row]
) -> None:
    compute = ComputeSettings(parallel=Ddp(ranks=2, **split), precision=Precision.FP32)
    trainer = await RankGroupTrainer.open(setup_of(model_dir, compute), GroupOptions(device="cuda"))
    try:
        assert await losses(trainer, rows) == pytest.approx(await on_cpu(model_dir, rows), abs=1e-4)
    finally:
        await trainer.close()


async def test_bf16_over_sharded_weights_trains(model_dir: Path, rows: list[Row]) -> None:
    trainer = await RankGroupTrainer.open(setup_of(model_dir, GROUPS["fsdp2"]), GroupOptions(device="cuda"))
    try:
        assert await losses(trainer, rows) == pytest.approx(await on_cpu(model_dir, rows), abs=0.05)
    finally:
        await trainer.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than 2 GPUs")
async def test_the_rank_that_is_left_aborts_nccl_and_hands_its_state_over(
    model_dir: Path, rows: list[Row], tmp_path: Path
) -> None:
    exact = ComputeSettings(parallel=Ddp(ranks=2, min_ranks=1), precision=Precision.FP32)
    setup = replace(setup_of(model_dir, exact), run_dir=tmp_path)
    notices: list[str] = []
    trainer = await ElasticTrainer.open(
        setup, GroupOptions(device="cuda"), notify=lambda severity, text: notices.append(text)
    )
    try:
        # It stops where the other waits for it in a sum, and is then killed.
        os.kill(trainer.group.pids[1], signal.SIGSTOP)
        training = asyncio.create_task(losses(trainer, rows))
        await asyncio.sleep(10.0)
        assert not training.done()
        os.kill(trainer.group.pids[1], signal.SIGKILL)
        assert await training == pytest.approx(await on_cpu(model_dir, rows), abs=1e-4)
    finally:
        await trainer.close()
    [notice] = notices
    assert "No step is lost: continuing with" in notice


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not installed")
async def test_the_gpus_that_are_planned_with_are_those_that_torch_has() -> None:
    found = await NvidiaSmi().gpus()
    assert sorted(gpu.name for gpu in found.values()) == sorted(
        torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
    )
    assert all(gpu.memory_bytes > 0 for gpu in found.values())
