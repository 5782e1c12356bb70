"""What only a GPU shows: bf16 by default, NCCL, sharding on the device. `make test-gpu`; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2, Precision
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


async def losses(trainer: InProcessTrainer | RankGroupTrainer, rows: list[Row]) -> list[float]:
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


async def test_bf16_over_sharded_weights_trains(model_dir: Path, rows: list[Row]) -> None:
    trainer = await RankGroupTrainer.open(setup_of(model_dir, GROUPS["fsdp2"]), GroupOptions(device="cuda"))
    try:
        assert await losses(trainer, rows) == pytest.approx(await on_cpu(model_dir, rows), abs=0.05)
    finally:
        await trainer.close()
