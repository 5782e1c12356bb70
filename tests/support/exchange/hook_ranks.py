"""What the ranks of the tests of `exchange.hooks` do: real processes, each with models of torch's own DDP, on Gloo."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fulmen_exchange import hooks
from fulmen_exchange.errors import HookUnsupported
from fulmen_exchange.hooks import ExchangeHook
from fulmen_exchange.ranks import StepInfo
from fulmen_exchange.registry import load_codecs
from fulmen_exchange.settings import CodecSettings

DEADLINE = timedelta(seconds=60)
SMALL_BUCKETS = 0.03
"""MiB: each matrix has a bucket of its own, but for those in DDP's first one, which takes 1 MiB."""


class RankPool:
    """Processes that are ranks of one process group after another. Torch is imported once, before they are forked."""

    def __init__(self, size: int, *modules: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # Optimisers import the second one when they are first used.
        context.set_forkserver_preload([__name__, "torch._dynamo", *modules])
        # Torch's distributed tensors remember places by mesh: a process must not be another rank of the same mesh later.
        self._pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(size)]

    def run(self, folder: Path, size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls `work(rank, *arguments)` on every rank at once; returns what each has found."""
        meeting = folder / "meeting"
        calls = [
            pool.submit(_as_rank, rank, size, str(meeting), work, arguments)
            for rank, pool in enumerate(self._pools[:size])
        ]
        for call in as_completed(calls, 2 * DEADLINE.total_seconds()):
            call.result()  # the first error is the cause of the others
        return [call.result() for call in calls]

    def close(self) -> None:
        """Ends the processes."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def _as_rank(rank: int, size: int, meeting: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=DEADLINE)
    try:
        return work(rank, *arguments)
    finally:
        dist.destroy_process_group()


class Layers(nn.Module):
    """Four matrices, of which the last is too small for a codec, and biases: three buckets, which DDP lays anew."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((130, 130), (130, 600), (600, 450), (450, 3))
        self.layers = nn.ModuleList([nn.Linear(*size) for size in sizes])

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes [n, 130] -> [n, 3]."""
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return inputs


class Given(nn.Module):
    """Matrices whose gradients are what the forward pass is given, whatever the weights are."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        """Computes a loss; a matrix for which there is None has no part in it."""
        pairs = zip(self.weights, gradients, strict=True)
        return sum(((weight * one).sum() for weight, one in pairs if one is not None), start=torch.zeros(()))


def settings_of(codec: str, **settings: Any) -> CodecSettings:
    """Makes the settings of a codec."""
    return load_codecs()[codec].settings(**settings)


def layers_with(
    settings: CodecSettings | None, *, overlap: bool = False, **ddp: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, ExchangeHook]:
    """Makes a model, the same on every rank, that trains with SGD; None is for DDP without a hook."""
    torch.manual_seed(7)
    return with_hook(Layers(), settings, learning_rate=0.1, overlap=overlap, **ddp)


def with_hook(
    module: nn.Module, settings: CodecSettings | None, *, learning_rate: float, overlap: bool = False, **ddp: Any
) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Wraps a module."""
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    if settings is None:
        return model, optimizer, None
    hook = hooks.register(model, settings, optimizer=optimizer, seed=3, overlap=overlap)
    return model, optimizer, hook


def rows_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Makes a rank's rows of a step: [8, 130] and [8, 3]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 130, generator=generator)
    return inputs, inputs[:, :3].sin()


def take_step(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int, *, parts: int = 1) -> float:
    """Takes a step over the rank's rows, in several passes; returns the loss."""
    inputs, targets = rows_of(rank, step)
    loss = 0.0
    optimizer.zero_grad()
    for part, (some, wanted) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True), start=1):
        with model.no_sync() if part < parts else nullcontext():
            error = (model(some) - wanted).square().mean() / parts
            error.backward()
            loss += error.item()
    optimizer.step()
    return loss


def digest(module: nn.Module) -> str:
    """Names the bits of a module's weights."""
    words = hashlib.sha256()
    for parameter in module.parameters():
        words.update(parameter.detach().numpy().tobytes())
    return words.hexdigest()


def flat(module: nn.Module) -> Any:
    """Returns all weights as one array."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).numpy()


def train(rank: int, codec: str, settings: dict[str, Any], steps: int, ddp: dict[str, Any]) -> dict[str, Any]:
    """Trains; returns the weights' digests after each step, the weights, losses, rounds and DDP's buckets."""
    model, optimizer, hook = layers_with(None if codec == "ddp" else settings_of(codec, **settings), **ddp)
    digests, losses = [], []
    for step in range(steps):
        losses.append(take_step(model, optimizer, rank, step, parts=1 + step % 2))
        digests.append(digest(model))
    return {
        "digests": digests,
        "weights": flat(model),
        "losses": losses,
        "rounds": hook.rounds if hook is not None else 0,
        "buckets": model._get_ddp_logging_data()["num_buckets_reduced"],
        "metrics": dict(hook.drain().metrics) if hook is not None else {},
    }


Gradients = list[list[list[Any]]]
"""Of each step and rank, of each matrix: an array; None for one that the rank does not use in the step."""


def give(
    rank: int, settings: CodecSettings | None, gradients: Gradients, ddp: dict[str, Any], zeros: bool = False
) -> list[Any]:
    """Trains matrices on gradients that are given; returns all weights after each step, which goes down by the average.

    Args:
        rank: This rank.
        settings: Of the codec; None for DDP without a hook.
        gradients: The first step has all of them.
        ddp: Further arguments of DDP.
        zeros: Whether gradients are set to zeros between steps, and not to None.
    """
    shapes = [one.shape for one in gradients[0][0]]
    model, optimizer, _ = with_hook(Given(*shapes), settings, learning_rate=1.0, **ddp)
    return _given(model, optimizer, rank, gradients, zeros=zeros)


def _given(model: Any, optimizer: torch.optim.Optimizer, rank: int, gradients: Gradients, *, zeros: bool) -> list[Any]:
    found = []
    for of_ranks in gradients:
        model([None if one is None else torch.from_numpy(one) for one in of_ranks[rank]]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeros)
        found.append(flat(model))
    return found


def give_to_powersgd(rank: int, matrix_rank: int, gradients: Gradients) -> tuple[list[Any], list[Any]]:
    """Gives torch's own PowerSGD hook gradients, and ours; returns the weights after each step, of torch's and of ours."""
    shape = gradients[0][0][0].shape
    theirs = DistributedDataParallel(Given(shape))
    state = powerSGD_hook.PowerSGDState(None, matrix_rank, start_powerSGD_iter=2, min_compression_rate=1.0)
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    found = _given(theirs, optimizer, rank, gradients, zeros=False)
    settings = settings_of("powersgd", matrix_rank=matrix_rank, min_ratio=1.0, dense_below=1)
    return found, give(rank, settings, gradients, {})


def go_on(
    rank: int, codec: str, settings: dict[str, Any], steps: int, *, overlap: bool = False
) -> tuple[list[str], list[str]]:
    """Trains, and trains again with a checkpoint after half of the steps; returns the digests of both."""
    chosen = settings_of(codec, **settings)
    model, optimizer, hook = layers_with(chosen, overlap=overlap)
    unbroken = []
    for step in range(steps):
        if step == steps // 2:
            weights = {name: one.clone() for name, one in model.module.state_dict().items()}
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, hook.state())
        take_step(model, optimizer, rank, step)
        unbroken.append(digest(model))
    model, optimizer, hook = layers_with(chosen, overlap=overlap)
    model.module.load_state_dict(weights)
    hook.restore(states)
    resumed = []
    for step in range(steps // 2, steps):
        take_step(model, optimizer, rank, step)
        resumed.append(digest(model))
    return unbroken[steps // 2 :], resumed


def train_with_scale(rank: int, codec: str, settings: dict[str, Any], scaled: bool) -> tuple[list[str], list[float]]:
    """Trains, with a loss scale that grows if `scaled`; returns the digests of the weights and the scales, by step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2, enabled=scaled)
    torch.manual_seed(7)
    model = DistributedDataParallel(Layers(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = settings_of(codec, **settings)
    hooks.register(model, chosen, optimizer=optimizer, seed=3, loss_scale=scaler.get_scale)
    digests, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        inputs, targets = rows_of(rank, step)
        scaler.scale((model(inputs) - targets).square().mean()).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        digests.append(digest(model))
    return digests, scales


def meet_infinity(
    rank: int, codec: str = "topk", overlap: bool = False, of_last: bool = False
) -> tuple[list[bool], int, list[str]]:
    """Trains; in the third step one rank's gradient is infinite. Returns where gradients were finite, rounds, digests.

    Args:
        rank: This rank.
        codec: Name of the codec.
        overlap: See `register`.
        of_last: Whether only that of the first layer is, which comes last.
    """
    settings: dict[str, Any] = {"ratio": 10.0} if codec in ("topk", "topk_quantised", "dgc") else {}
    settings |= {"clip": 0.0} if codec == "dgc" else {}
    model, optimizer, hook = layers_with(settings_of(codec, **settings), overlap=overlap)
    finite, digests = [], []
    for step in range(5):
        optimizer.zero_grad()
        inputs, targets = rows_of(rank, step)
        infinite = float("inf") if (rank, step) == (1, 2) else 1.0
        if of_last:
            first = model.module.layers[0].weight
            handle = first.register_hook(lambda gradient, by=infinite: gradient * by)
        error = (model(inputs) - targets).square().mean() * (1.0 if of_last else infinite)
        error.backward()
        if of_last:
            handle.remove()
        finite.append(all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()))
        if finite[-1]:
            optimizer.step()
        digests.append(digest(model))
    return finite, hook.rounds, digests


def train_unevenly(rank: int, codec: str, overlap: bool = False) -> str:
    """Trains; rank 1 has one step more, in which the others have no rows. Returns the digest of the weights."""
    model, optimizer, _ = layers_with(None if codec == "ddp" else settings_of(codec), overlap=overlap)
    with model.join():
        for step in range(3 + rank):
            take_step(model, optimizer, rank, step)
    return digest(model)


def train_two_of_four(rank: int, overlap: bool = False) -> str:
    """Trains ranks 1 and 3 of four together, as a group of their own; returns their digest."""
    group = dist.new_group([1, 3])
    if rank in (0, 2):
        return ""
    model, optimizer, _ = layers_with(settings_of("topk", ratio=10.0), overlap=overlap, process_group=group)
    for step in range(3):
        take_step(model, optimizer, rank, step)
    return digest(model)


def train_on_progress(rank: int) -> list[float]:
    """Trains with a policy that goes by the run's progress; returns the ratio of each step."""
    stages = {"kind": "stages", "warmup_rounds": 0}
    model, optimizer, hook = layers_with(settings_of("topk", policy=stages))
    ratios = []
    for step, progress in enumerate((0.0, 0.5, 0.9)):
        hook.step_info = StepInfo(progress=progress)
        take_step(model, optimizer, rank, step)
        ratios.append(hook.drain().metrics["exchange_ratio"])
    return ratios


def refusals(_: int) -> dict[str, str]:
    """Tries what cannot be; returns what is said of each."""
    layers = DistributedDataParallel(Layers())
    sgd = torch.optim.SGD(layers.parameters(), lr=0.1)
    adamw = torch.optim.AdamW(layers.parameters())
    with_momentum = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    embedding = DistributedDataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    topk = settings_of("topk")
    grpc = {"kind": "grpc", "targets": ["127.0.0.1:1"]}
    tried: dict[str, tuple[Any, CodecSettings, torch.optim.Optimizer]] = {
        "fsdp2": (fully_shard(Layers()), topk, sgd),
        "no ddp": (Layers(), topk, sgd),
        "link": (layers, settings_of("qsgd", link=grpc), sgd),
        "outer": (layers, settings_of("topk", outer={"kind": "outer"}), sgd),
        "adamw": (layers, topk, adamw),
        "momentum": (layers, settings_of("dgc"), with_momentum),
        "sparse": (embedding, topk, sgd),
    }
    found = {}
    for name, (model, settings, optimizer) in tried.items():
        try:
            hooks.register(model, settings, optimizer=optimizer, seed=0)
        except HookUnsupported as error:
            found[name] = str(error)
    return found
