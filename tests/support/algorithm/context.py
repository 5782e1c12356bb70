# ruff: noqa: N806 (tensor names end with their shape)
"""What ranks do in tests of rows that are split by positions: real processes on Gloo."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.compute import ComputeSettings
from fulmen_algorithm.training.context_parallel import ContextSplit, ContextUnsupported, PartMask
from fulmen_algorithm.training.micro_batches import micro_batches
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.scorer import layers_of
from fulmen_algorithm.training.settings import BatchSettings, LoraSettings, OptimizerSettings, Sgd, StepSettings
from fulmen_algorithm.weights.sources import whole
from fulmen_exchange.ranks import Ranks
from tests.support.algorithm.copies import ranks_of


@dataclass(frozen=True, kw_only=True)
class Work:
    """What some ranks train.

    Attributes:
        model_dir: The model.
        rows: Rows of each step.
        compute: The ranks, and how they compute.
        step: Settings of each step.
        supervised: Whether steps are supervised.
        lora: Adapters.
    """

    model_dir: Path
    rows: Sequence[Row]
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    step: StepSettings = field(default_factory=lambda: StepSettings(token_budget=64))
    supervised: bool = False
    lora: LoraSettings | None = None

    def open(self, rank: int) -> LocalTrainer:
        """Opens the trainer of a rank. Steps of SGD have the size of the gradients, so that each gradient counts."""
        optimizer = OptimizerSettings(learning_rate=0.1, rule=Sgd(momentum=0.9))
        setup = TrainerSetup(
            model_dir=self.model_dir, optimizer=optimizer, seed=3, compute=self.compute, lora=self.lora
        )
        return LocalTrainer.open(setup, ranks_of(rank) if dist.is_initialized() else Ranks())


def trained(rank: int, work: Work) -> dict[str, Any]:
    """Takes three steps; returns their results, the log-probabilities that follow, and all weights."""
    trainer, results = work.open(rank), []
    for seed in range(3):
        if work.supervised:
            results.append(trainer.train_supervised(work.rows, settings=work.step))
        else:
            batch = BatchSettings(minibatches=1)
            results += trainer.train(work.rows, settings=work.step, batch=batch, seed=seed, current_version=3)
    weights = dict(trainer._state.policy.model.named_parameters())
    return {
        "numbers": [(each.loss, each.grad_norm) for each in results],
        "metrics": [dict(each.metrics) for each in results],
        "logprobs": trainer.logprobs(work.rows, settings=work.step),
        "weights": {name: whole(weight).detach().clone() for name, weight in weights.items()},
    }


def opened(rank: int, work: Work) -> str:
    """Opens a trainer; returns why that fails."""
    try:
        work.open(rank)
    except RunFailed as error:
        return str(error)
    return ""


def opened_with_shifted_tokens(rank: int, work: Work) -> str:
    """Opens a model whose first layer adds to each position what is before it; returns why that fails."""
    policy = PolicyModel.load(work.model_dir)

    def shift(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + 0.1 * nn.functional.pad(output[:, :-1], (0, 0, 1, 0))

    layers_of(policy.model)[0].register_forward_hook(shift)
    try:
        policy.prepare(work.compute, ranks_of(rank))
    except ContextUnsupported as error:
        return str(error)
    return ""


def dealt(rank: int, width: int) -> tuple[list[int], bool, list[list[float]]]:
    """Deals two lines; returns this rank's positions, whether they are joined again, and the gradient of joined keys.

    The loss of each rank is the sum of all keys times its number from 1, of which the sum over ranks is wanted.
    """
    ranks = ranks_of(rank)
    numbers_BT = torch.arange(1, 2 * width + 1).view(2, width)
    split = ContextSplit(ranks, torch.arange(width).expand(2, -1), None)
    mine = split.take(numbers_BT)
    keys = mine.double()[:, None, :, None].requires_grad_()
    gathered, values = split.gather(keys, keys)
    ((gathered + values).sum() * (rank + 1)).backward()
    assert keys.grad is not None
    return mine[0].tolist(), torch.equal(split.join(mine), numbers_BT), keys.grad[:, 0, :, 0].tolist()


def masks_left(rank: int, work: Work) -> int:
    """Takes a step without the collector of cycles; returns how many masks are left then."""
    trainer = work.open(rank)
    gc.collect()
    gc.disable()
    try:
        trainer.train_supervised(work.rows, settings=work.step)
        return sum(isinstance(each, PartMask) for each in gc.get_objects())
    finally:
        gc.enable()


def kept_bytes(rank: int, work: Work) -> int:
    """Returns the bytes that one micro-batch keeps for its backward pass, beside the weights: activations and the mask."""
    gc.collect()
    policy = work.open(rank)._state.policy
    weights = {each.untyped_storage().data_ptr() for each in policy.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    [micro] = micro_batches(policy, work.rows, work.step)[0]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy.token_logprobs(micro, trained_only=True).sum()
    for mask in (each for each in gc.get_objects() if isinstance(each, PartMask)):
        # Layers that are computed again hold it without torch's knowledge.
        for tensor in mask.added(torch.float32):
            keep(tensor)
    # Torch frees what it needs to compute layers again in a backward pass alone.
    loss.backward()
    return sum(kept.values())
