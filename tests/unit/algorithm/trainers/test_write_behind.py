"""What is written behind the training is what was there when it was copied, bit for bit."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fulmen_algorithm.algorithms.grpo import GrpoSettings
from fulmen_algorithm.algorithms.sft import SftSettings
from fulmen_algorithm.policy.trainer import TrainerSetup, WritesBehind
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, StepSettings, WeightsKind
from fulmen_algorithm.weights.publishing import WeightsOrder
from fulmen_algorithm.weights.tensor_files import read_tensors
from fulmen_exchange.ranks import Ranks

ORDER = WeightsOrder(dtype="bfloat16", keep=True)


@pytest.fixture
def trainer(model_dir: Path) -> LocalTrainer:
    setup = TrainerSetup(model_dir=model_dir, optimizer=OptimizerSettings(learning_rate=1e-2), seed=3)
    return LocalTrainer.open(setup, Ranks())


def train(trainer: LocalTrainer, rows, *, seed: int) -> None:
    trainer.train(rows, settings=StepSettings(), batch=BatchSettings(), seed=seed, current_version=seed)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_another_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_written_after_more_training_is_the_one_that_was_copied(trainer, rows, tmp_path, dtype):
    train(trainer, rows, seed=0)
    order = WeightsOrder(dtype=dtype)
    expected = trainer.write_weights(tmp_path / "at once", order)
    write = trainer.copy_weights(order)
    train(trainer, rows, seed=1)
    found = []
    in_another_thread(lambda: found.append(write(tmp_path / "behind")))
    assert found == [expected]
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "at once")
    assert trainer.write_weights(tmp_path / "later", order).sha256 != expected.sha256


def test_a_delta_written_behind_is_the_same_file_and_the_base_of_the_next(trainer, rows, tmp_path):
    beginning = tmp_path / "beginning"
    beginning.mkdir()
    trainer.write_state(beginning)
    for name, behind in (("at once", False), ("behind", True)):
        trainer.read_state(beginning)
        base = ""
        for step in range(3):
            order = replace(ORDER, base_sha256=base, dense_above=2.0)
            folder = tmp_path / name / str(step)
            folder.parent.mkdir(exist_ok=True)
            if behind:
                write = trainer.copy_weights(order)
                train(trainer, rows, seed=step)
                written = write(folder)
            else:
                written = trainer.write_weights(folder, order)
                train(trainer, rows, seed=step)
            assert written.kind is (WeightsKind.DELTA if base else WeightsKind.FULL)
            base = written.sha256
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "at once")


def test_a_state_written_after_more_training_resumes_where_it_was_copied(trainer, rows, tmp_path):
    train(trainer, rows, seed=0)
    write = trainer.copy_state()
    train(trainer, rows, seed=1)
    uninterrupted = trainer.write_weights(tmp_path / "uninterrupted", ORDER).sha256
    (tmp_path / "state").mkdir()
    in_another_thread(lambda: write(tmp_path / "state"))
    train(trainer, rows, seed=2)
    trainer.read_state(tmp_path / "state")
    train(trainer, rows, seed=1)
    assert trainer.write_weights(tmp_path / "resumed", ORDER).sha256 == uninterrupted


def test_a_copied_state_has_the_numbers_of_one_written_at_once(trainer, rows, tmp_path):
    train(trainer, rows, seed=0)
    write = trainer.copy_state()
    found = []
    for name, written in (("behind", write), ("at once", trainer.write_state)):
        folder = tmp_path / name
        folder.mkdir()
        written(folder)
        moments = [read_tensors(file)[0] for file in sorted(folder.rglob("*.safetensors"))]
        digests = {name: tensor.digest() for tensors in moments for name, tensor in tensors.items()}
        counters = torch.load(folder / "training.pt", weights_only=True)
        found.append((digests, str(counters), sorted(files_of(folder))))
    assert found[0] == found[1]


async def test_training_goes_on_before_what_was_copied_is_written(model_dir, rows, tmp_path):
    thread = TorchThread(torch_threads=1)
    setup = TrainerSetup(model_dir=model_dir, optimizer=OptimizerSettings(learning_rate=1e-2), seed=3)
    trainer = await InProcessTrainer.open(setup, thread=thread, device="cpu")
    try:
        assert isinstance(trainer, WritesBehind)
        expected = await trainer.write_weights(tmp_path / "at once", ORDER)
        weights, state = await trainer.copy_weights(ORDER), await trainer.copy_state()
        await trainer.train(rows, settings=StepSettings(), batch=BatchSettings(), seed=0, current_version=0)
        assert await weights(tmp_path / "behind") == expected
        (tmp_path / "state").mkdir()
        await state(tmp_path / "state")
        await trainer.read_state(tmp_path / "state")
        assert await trainer.write_weights(tmp_path / "resumed", ORDER) == expected
    finally:
        await trainer.close()
        thread.close()


def test_ranks_write_between_steps():
    assert not issubclass(RankGroupTrainer, WritesBehind)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"parallel": {"kind": "ddp"}}, "needs parallel.kind none"),
        ({"lora": {"rank": 2}}, "needs all weights to be trained"),
    ],
)
def test_what_cannot_be_written_behind_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        SftSettings.model_validate({"write_behind": True, **settings})


def test_a_run_without_staleness_cannot_publish_behind():
    with pytest.raises(ValueError, match="needs max_staleness above 0"):
        GrpoSettings(write_behind=True, max_staleness=0)
