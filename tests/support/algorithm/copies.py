"""What ranks do in tests of several copies of the weights: real processes on Gloo, each with a trainer of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2, ParallelSettings
from fulmen_algorithm.training.micro_batches import micro_batches
from fulmen_algorithm.training.parallel import AllReduce
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.scorer import layers_of
from fulmen_algorithm.training.settings import AdamW, OptimizerSettings, StepSettings, UpdateRule
from fulmen_algorithm.training.step import sft_step
from fulmen_exchange.codecs.codec import RESIDUAL
from fulmen_exchange.parts import local
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.settings import CodecSettings

STEP = StepSettings(token_budget=64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a group trains: the model, its rows, and how."""

    model_dir: Path
    rows: Sequence[Row]
    parallel: ParallelSettings
    exchange: CodecSettings | None = None
    rule: UpdateRule = field(default_factory=AdamW)
    learning_rate: float = 1e-3

    def open(self, rank: int) -> LocalTrainer:
        """Opens the trainer of a rank."""
        setup = TrainerSetup(
            model_dir=self.model_dir,
            optimizer=OptimizerSettings(learning_rate=self.learning_rate, rule=self.rule),
            seed=3,
            compute=ComputeSettings(parallel=self.parallel),
            exchange=self.exchange,
        )
        return LocalTrainer.open(setup, ranks_of(rank))


def ranks_of(rank: int) -> Ranks:
    """Returns all ranks of the process group."""
    return Ranks(rank=rank, world_size=dist.get_world_size(), group=dist.group.WORLD)


def train(rank: int, case: Case, steps: int) -> dict[str, Any]:
    """Takes supervised steps; returns losses, norms, and after each step a digest of the bits of this rank's weights."""
    trainer = case.open(rank)
    results, digests = [], []
    for _ in range(steps):
        results.append(trainer.train_supervised(case.rows, settings=STEP))
        digests.append(digest(trainer._state.policy))
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "sent_bytes": sum(result.exchange.get("exchange_sent_bytes", 0.0) for result in results),
        "digests": digests,
    }


def digest(policy: PolicyModel) -> str:
    """Names the bits of what this rank holds of the weights."""
    words = hashlib.sha256()
    for parameter in policy.model.parameters():
        words.update(local(parameter.detach()).contiguous().numpy().tobytes())
    return words.hexdigest()


def sums_and_torchs_own(rank: int, case: Case) -> list[tuple[bool, int]]:
    """Sums gradients as a step does, and by torch's own hybrid sharding; of each parameter: the same bits, and how many."""
    assert isinstance(case.parallel, Fsdp2)
    ours, theirs = PolicyModel.load(case.model_dir), PolicyModel.load(case.model_dir)
    ours.prepare(ComputeSettings(parallel=case.parallel), ranks_of(rank))
    shape = (case.parallel.copies, case.parallel.ranks_per_copy)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (*layers_of(theirs.model), theirs._scorer):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in theirs._scorer.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    [micro] = micro_batches(ours, case.rows, StepSettings(token_budget=8192))[0]
    for one in (ours, theirs):
        one.token_logprobs(micro).sum().backward()
    AllReduce().reduce(list(ours.model.parameters()), ours.groups.peers, StepInfo())
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    return [(torch.equal(local(one.grad), local(other.grad)), local(one.grad).numel()) for one, other in pairs]


def all_reduce_hook(rank: int, case: Case) -> dict[str, Any]:
    """Registers torch's all-reduce hook on the layers of a copy, and runs two micro-batches; returns what it sees."""
    policy = PolicyModel.load(case.model_dir)
    policy.prepare(ComputeSettings(parallel=case.parallel), ranks_of(rank))
    layer = layers_of(policy.model)[0]
    assert isinstance(layer, FSDPModule)
    calls: list[tuple[str, int, bool]] = []
    weight = next(layer.parameters())

    def hook(summed: torch.Tensor) -> None:
        calls.append((str(summed.dtype), summed.numel(), weight.grad is None))

    layer.set_all_reduce_hook(hook)
    [micro] = micro_batches(policy, case.rows, StepSettings(token_budget=8192))[0]
    for _ in range(2):
        policy.token_logprobs(micro).sum().backward()
    counted = len(calls)
    layer.set_requires_gradient_sync(False)
    policy.token_logprobs(micro).sum().backward()
    held = sum(local(parameter).numel() for parameter in layer.parameters())
    return {"calls": calls[:counted], "without_sync": len(calls) - counted, "held": held}


class _Telling(AllReduce):
    """Tells the seconds of this rank's passes, as they are measured, before it sums."""

    def __init__(self, told: dist.Store) -> None:
        self._told = told
        self._steps = 0

    def reduce(self, parameters: Any, ranks: Ranks, step_info: StepInfo) -> None:
        self._told.set(f"{ranks.rank}/{self._steps}", str(step_info.compute_s))
        self._steps += 1
        super().reduce(parameters, ranks, step_info)


def train_with_a_slow_rank(rank: int, case: Case, steps: int, meeting: Path) -> dict[str, Sequence[float]]:
    """Takes steps, in which rank 1 takes at least four times as long as rank 0; returns losses, and positions by step."""
    state = case.open(rank)._state
    told = dist.FileStore(str(meeting), 2)
    state.reducer = _Telling(told)
    positions = [0] * steps

    def slow_down(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        step = state.optimizer_steps
        if rank == 1 and not positions[step]:
            time.sleep(4.0 * float(told.get(f"0/{step}")))
        positions[step] += given[0].numel()

    state.policy._scorer.register_forward_pre_hook(slow_down)
    return {"losses": [sft_step(state, case.rows, settings=STEP).loss for _ in range(steps)], "positions": positions}


def store_state(rank: int, case: Case, folder: Path, steps: int, read: Path | None = None) -> None:
    """Takes steps, after reading the state of other ranks if told so, and writes the state."""
    trainer = case.open(rank)
    if read is not None:
        trainer.read_state(read)
    for _ in range(steps):
        trainer.train_supervised(case.rows, settings=STEP)
    trainer.write_state(folder)


def residual_of(folder: Path) -> dict[str, torch.Tensor]:
    """Adds up what all ranks that wrote a state keep back, by parameter, flat."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("exchange-*.pt")):
        for one in torch.load(file, weights_only=True)["codecs"]:
            for slices in (one["states"], one["shard"]):
                for name, slice_ in slices.items():
                    part = slice_["tensors"][RESIDUAL]
                    whole = found.setdefault(name, torch.zeros(1 << 14))
                    whole[slice_["begin"] : slice_["begin"] + part.numel()] += part
    return found
