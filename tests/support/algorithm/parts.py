"""What ranks do in tests of models in parts: real processes on Gloo."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2, Precision
from fulmen_algorithm.training.parallel import groups_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import LoraSettings, OptimizerSettings, StepSettings
from fulmen_algorithm.training.state_files import read_parts, write_parts
from fulmen_algorithm.weights.publishing import WeightsOrder
from fulmen_algorithm.weights.sources import whole
from fulmen_exchange.parts import local
from fulmen_exchange.ranks import Ranks
from tests.support.algorithm.copies import Case, digest, ranks_of

STEP = StepSettings(token_budget=64)
M_MMAP_THRESHOLD = -3
"""As in malloc.h of glibc."""


def load_both(rank: int, parallel: Fsdp2, model_dir: Path, lora: LoraSettings | None) -> dict[str, Any]:
    """Loads a model in parts, and as a whole; returns what differs, and the bytes that this rank holds of all."""
    ranks = ranks_of(rank)
    mesh = groups_of(ranks, parallel).mesh
    torch.manual_seed(3)
    parts = PolicyModel.load(model_dir, lora=lora, mesh=mesh)
    torch.manual_seed(3)
    entire = PolicyModel.load(model_dir, lora=lora)
    held = sum(p.to_local().nbytes for p in parts.model.parameters() if hasattr(p, "to_local"))
    parts.prepare(ComputeSettings(parallel=parallel), ranks)
    mine, theirs = parts.model.state_dict(), entire.model.state_dict()
    buffers = dict(entire.model.named_buffers())
    return {
        "names": mine.keys() ^ theirs.keys(),
        "weights": [name for name, tensor in theirs.items() if not torch.equal(whole(mine[name]), tensor)],
        "buffers": [name for name, one in parts.model.named_buffers() if not torch.equal(one, buffers[name])],
        "traits": parts._scorer.traits == entire._scorer.traits,
        "tied": len(list(parts.model.parameters())) == len(list(entire.model.parameters())),
        "held": held / sum(p.nbytes for p in entire.model.parameters()),
    }


def store(rank: int, size: int, shard: int, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors in parts; `shard` 0 is for ranks that have them whole."""
    write_parts(_placed(rank, size, shard, tensors), folder, dist.group.WORLD if size > 1 else None)


def restore(rank: int, size: int, shard: int, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Reads what `store` wrote; returns the names of tensors that differ from the given ones."""
    found = _placed(rank, size, shard, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    read_parts(found, folder, dist.group.WORLD if size > 1 else None)
    return [name for name, tensor in tensors.items() if not torch.equal(whole(found[name]), tensor)]


def store_by_last_copy(rank: int, case: Case, folder: Path) -> dict[str, Any] | None:
    """Takes a step, and lets the ranks of the last copy write the state alone, as if the others were lost."""
    trainer = case.open(rank)
    trainer.train_supervised(case.rows, settings=STEP)
    policy = trainer._state.policy
    if policy.groups.peers.rank != policy.groups.peers.world_size - 1:
        return None
    policy.ranks = policy.groups.copy
    trainer.write_state(folder)
    return entire_state(trainer)


def _placed(rank: int, size: int, shard: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not shard:
        return dict(tensors)
    mesh = groups_of(ranks_of(rank), Fsdp2(ranks=size, shard=shard)).mesh
    assert mesh is not None
    return {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in tensors.items()}


def train_and_store(rank: int, case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """Takes steps and writes the state; returns all weights, moments and counts, whole."""
    trainer = case.open(rank)
    for _ in range(steps):
        trainer.train_supervised(case.rows, settings=STEP)
    trainer.write_state(folder)
    return entire_state(trainer)


def open_and_restore(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """Reads a state; returns what `train_and_store` does."""
    trainer = case.open(rank)
    trainer.read_state(folder)
    return entire_state(trainer)


def entire_state(trainer: LocalTrainer) -> dict[str, Any]:
    """Gathers the weights, moments and counts of a trainer."""
    state = trainer._state
    found: dict[str, Any] = {"steps": state.optimizer_steps, "norms": state.norms.norms}
    for name, parameter in state.policy.model.named_parameters():
        found[name] = whole(parameter).clone()
        for key, value in state.optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(value).clone()
    return found


@dataclass(frozen=True, kw_only=True)
class Large:
    """A model of some hundred megabytes, and how much memory its ranks may take on top of what they have.

    Attributes:
        model_dir: The model, stored in bfloat16.
        tiny_dir: A tiny one: with it everything is imported, and every thread started, before memory is limited.
        rows: Rows of both.
        parallel: The ranks.
        share: Share of the weights in float32 that may be added.
    """

    model_dir: Path
    tiny_dir: Path
    rows: list[Row]
    parallel: Fsdp2
    share: float

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return sum(file.stat().st_size for file in self.model_dir.glob("*.safetensors"))

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights in float32."""
        return 2 * self.file_bytes

    def open(self, rank: int, model_dir: Path) -> LocalTrainer:
        """Opens a trainer in parts."""
        compute = ComputeSettings(parallel=self.parallel)
        optimizer = OptimizerSettings(learning_rate=1e-6)
        return LocalTrainer.open(
            TrainerSetup(model_dir=model_dir, optimizer=optimizer, seed=3, compute=compute), ranks_of(rank)
        )


def give_memory_back() -> None:
    """Makes the C library return large blocks when they are freed; otherwise it keeps them for what comes next."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)


@contextlib.contextmanager
def memory_limited_to(more_bytes: int) -> Iterator[None]:
    """Lets this process take so many bytes more, by the kernel's count of private writable memory."""
    status = Path("/proc/self/status").read_text()
    present = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData")))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (present + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def work_in_parts(rank: int, large: Large, folder: Path) -> dict[str, Any]:
    """Loads, stores, restores and publishes with limited memory; trains in between without a limit."""
    give_memory_back()
    _use(large.open(rank, large.tiny_dir), large, folder / "tiny", more_bytes=1 << 40)
    more_bytes = int(large.share * large.whole_bytes)
    with memory_limited_to(large.file_bytes + more_bytes):
        trainer = large.open(rank, large.model_dir)
    return _use(trainer, large, folder, more_bytes=more_bytes)


def _use(trainer: LocalTrainer, large: Large, folder: Path, *, more_bytes: int) -> dict[str, Any]:
    mine, state = folder / str(trainer._state.policy.ranks.rank), folder / "state"
    state.mkdir(parents=True, exist_ok=True)
    trainer.train_supervised(large.rows, settings=STEP)
    before = digest(trainer._state.policy)
    with memory_limited_to(more_bytes):
        trainer.write_state(state)
        full = trainer.write_weights(mine / "full", WeightsOrder(dtype="bfloat16", keep=True))
    trainer.train_supervised(large.rows, settings=STEP)
    with memory_limited_to(more_bytes):
        base = full.sha256 if full is not None else ""
        [base] = [one for one in trainer._state.policy.groups.copy.gather(base) if one]
        delta = trainer.write_weights(mine / "delta", WeightsOrder(dtype="bfloat16", keep=True, base_sha256=base))
    # What the file holds is mapped while it is read.
    with memory_limited_to(large.whole_bytes + more_bytes):
        trainer.read_state(state)
    return {"full": full, "delta": delta, "restored": digest(trainer._state.policy) == before}


def load_whole(_: int, large: Large) -> str:
    """Loads all weights with the memory that suffices for a part; returns the error."""
    give_memory_back()
    PolicyModel.load(large.tiny_dir)
    try:
        with memory_limited_to(large.file_bytes + int(large.share * large.whole_bytes)):
            PolicyModel.load(large.model_dir)
    except (RuntimeError, MemoryError) as error:
        return str(error)
    return ""


def share_of_critic(rank: int, parallel: Fsdp2, model_dir: Path) -> tuple[float, bool]:
    """Loads a critic as a trainer does; returns the share that this rank holds, and whether its weights are the policy's."""
    ranks = ranks_of(rank)
    setup = TrainerSetup(
        model_dir=model_dir,
        optimizer=OptimizerSettings(learning_rate=1e-3),
        seed=3,
        compute=ComputeSettings(parallel=parallel),
        critic=CriticPlan(),
    )
    state = LocalTrainer.open(setup, ranks)._state
    assert state.critic is not None
    weights = dict(state.critic.model.named_parameters())
    policys = dict(state.policy.model.named_parameters())
    held = sum(local(weight).numel() for weight in weights.values()) / sum(w.numel() for w in weights.values())
    trunk = [name for name in weights if name in policys]
    same = all(torch.equal(whole(weights[name]), whole(policys[name])) for name in trunk)
    heads = [whole(weight) for name, weight in weights.items() if name not in policys]
    return held, bool(trunk) and same and bool(heads) and not any(head.any() for head in heads)


def losses_norms_and_weights(rank: int, case: Case, precision: Precision) -> tuple[list[tuple[float, float]], Any]:
    """Takes three supervised steps; returns their losses and norms, and all weights, whole."""
    setup = TrainerSetup(
        model_dir=case.model_dir,
        optimizer=OptimizerSettings(learning_rate=case.learning_rate, rule=case.rule),
        seed=3,
        compute=ComputeSettings(parallel=case.parallel, precision=precision),
    )
    trainer = LocalTrainer.open(setup, ranks_of(rank) if dist.is_initialized() else Ranks())
    results = [trainer.train_supervised(case.rows, settings=STEP) for _ in range(3)]
    weights = {name: whole(weight).clone() for name, weight in trainer._state.policy.model.named_parameters()}
    return [(result.loss, result.grad_norm) for result in results], weights
