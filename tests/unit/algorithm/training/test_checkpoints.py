import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from fulmen_algorithm.persistence.checkpoints import Checkpoint, CheckpointStore
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, Schedule, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.state_files import UnknownFormat, read_state, write_state
from fulmen_algorithm.training.step import train_batch

OPTIMIZER = OptimizerSettings(learning_rate=1e-3, schedule=Schedule.COSINE, warmup_steps=2, total_steps=20)
BATCH = BatchSettings(minibatches=2)


def fresh(model_dir):
    return make_state(PolicyModel.load(model_dir), OPTIMIZER)


def save(store: CheckpointStore, state, progress) -> Checkpoint:
    folder = store.begin()
    write_state(state, folder)
    return store.complete(folder, progress)


def draw() -> float:
    return float(torch.rand(1))


def train(state, rows, steps: range) -> None:
    for step in steps:
        train_batch(state, rows, settings=StepSettings(), batch=BATCH, seed=step, current_version=step)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, model_dir, rows):
    torch.manual_seed(3)
    whole = fresh(model_dir)
    train(whole, rows, range(6))
    expected_draw = draw()

    torch.manual_seed(3)
    first = fresh(model_dir)
    train(first, rows, range(3))
    save(CheckpointStore(directory=tmp_path), first, {"cursor": "abc", "step": 3})
    torch.manual_seed(99)

    second = fresh(model_dir)
    found = CheckpointStore(directory=tmp_path).newest()
    assert found.damaged == ()
    assert found.checkpoint.progress == {"cursor": "abc", "step": 3}
    read_state(found.checkpoint.path, second)
    train(second, rows, range(3, 6))

    assert draw() == expected_draw
    assert second.optimizer_steps == whole.optimizer_steps
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] < OPTIMIZER.learning_rate
    for (name, a), b in zip(whole.policy.model.named_parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    moments = whole.optimizer.state_dict()["state"], second.optimizer.state_dict()["state"]
    for index in moments[0]:
        assert all(torch.equal(moments[0][index][k], moments[1][index][k]) for k in moments[0][index])


def test_the_last_ones_are_kept_and_the_model_in_them_loads(tmp_path, model_dir):
    store = CheckpointStore(directory=tmp_path, keep=2)
    state = fresh(model_dir)
    for step in range(4):
        save(store, state, {"step": step})
    assert [c.progress["step"] for c in store.listed()] == [2, 3]
    PolicyModel.load(store.newest().checkpoint.model_dir)


@pytest.mark.parametrize("file", ["model/model.safetensors", "training.pt", "progress.json", "manifest.json"])
@pytest.mark.parametrize("how", ["changed", "cut", "missing"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, model_dir, file, how):
    store = CheckpointStore(directory=tmp_path)
    state = fresh(model_dir)
    save(store, state, {"step": 1})
    damaged = save(store, state, {"step": 2})
    path = damaged.path / file
    content = path.read_bytes()
    match how:
        case "changed":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "missing":
            path.unlink()
    found = store.newest()
    assert found.checkpoint.progress == {"step": 1}
    assert [d.path for d in found.damaged] == [damaged.path]


def test_a_state_of_another_release_is_refused_by_its_format(tmp_path, model_dir):
    state = fresh(model_dir)
    write_state(state, tmp_path)
    saved = torch.load(tmp_path / "training.pt", weights_only=True)
    for later, text in (({**saved, "format": 3}, "has format 3"), ({"moments": {}}, "has format 1")):
        torch.save(later, tmp_path / "training.pt")
        with pytest.raises(UnknownFormat, match=f"{text}; this release reads format 2"):
            read_state(tmp_path, state)


def test_progress_that_is_not_json_makes_no_checkpoint(tmp_path, model_dir):
    store = CheckpointStore(directory=tmp_path)
    with pytest.raises(TypeError):
        save(store, fresh(model_dir), {"x": object()})
    assert store.newest().checkpoint is None


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import fulmen_algorithm.persistence.checkpoints as checkpoints
    from fulmen_algorithm.training.policy import PolicyModel
    from fulmen_algorithm.training.settings import OptimizerSettings
    from fulmen_algorithm.training.state_files import write_state
    from fulmen_algorithm.training.state import make_state

    def save(progress):
        folder = store.begin()
        write_state(state, folder)
        store.complete(folder, progress)

    state = make_state(PolicyModel.load(sys.argv[1]), OptimizerSettings(learning_rate=1e-3))
    store = checkpoints.CheckpointStore(directory=Path(sys.argv[2]), keep=1)
    save({"step": 1})
    remaining = int(sys.argv[3])
    sync = checkpoints.sync

    def dying_sync(path):
        global remaining
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        remaining -= 1
        sync(path)

    checkpoints.sync = dying_sync
    save({"step": 2})
"""


@pytest.mark.long(short=True)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("syncs", [0, 3])
def test_killed_in_the_middle_of_a_save_the_one_before_is_intact(tmp_path, model_dir, rows, syncs):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(model_dir), str(tmp_path), str(syncs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-500:]
    store = CheckpointStore(directory=tmp_path)
    found = store.newest()
    assert found.checkpoint.progress == {"step": 1}
    state = fresh(model_dir)
    checkpoint = save(store, state, {"step": 3})
    assert json.loads((checkpoint.path / "progress.json").read_text()) == {"step": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00000001", "checkpoint-00000002"]
