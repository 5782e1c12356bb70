"""What the ranks of the tests of `exchange.overlap` do; see `hook_ranks`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fulmen_exchange import hooks, layout
from fulmen_exchange.errors import HookUnsupported
from fulmen_exchange.fsdp2 import register_fsdp2
from fulmen_exchange.parts import local
from tests.support.exchange.hook_ranks import (
    DEADLINE,
    Given,
    Layers,
    digest,
    go_on,
    layers_with,
    rows_of,
    settings_of,
    take_step,
    with_hook,
)


@contextmanager
def small_layout() -> Iterator[None]:
    """Gives each of the large matrices a bucket of its own."""
    usual, layout.BUCKET_BYTES = layout.BUCKET_BYTES, 1000
    try:
        yield
    finally:
        layout.BUCKET_BYTES = usual


def train_in_buckets(rank: int, codec: str, settings: dict[str, Any], steps: int, more: dict[str, Any]) -> Any:
    """Trains as `train`, in several buckets; returns digests, bytes sent, and the number of buckets."""
    with small_layout():
        model, optimizer, hook = layers_with(settings_of(codec, **settings), **more)
        digests = []
        for step in range(steps):
            take_step(model, optimizer, rank, step, parts=1 + step % 2)
            digests.append(digest(model))
        buckets = len(hook._reducer.names_of_buckets)
        return {"digests": digests, "sent": hook.drain().metrics["exchange_raw_bytes"], "layout": buckets}


def order_of_sums(rank: int) -> list[str]:
    """Takes two steps; of the second, returns what came in which order."""
    with small_layout():
        model, optimizer, hook = layers_with(settings_of("topk"), overlap=True)
        take_step(model, optimizer, rank, 0)
        order: list[str] = []
        last_summed, add = threading.Event(), hook._reducer.add

        def noted(bucket: int) -> None:
            add(bucket)
            order.append(f"bucket {bucket} summed")
            last_summed.set()

        def computed(gradient: Tensor) -> None:
            last_summed.wait(DEADLINE.total_seconds())  # the pass goes on only when a bucket has been summed
            order.append("gradient of layer 0")

        hook._reducer.add = noted  # type: ignore[method-assign]
        model.module.layers[0].weight.register_hook(computed)
        take_step(model, optimizer, rank, 1)
        return order


def clip_overlapped(rank: int) -> tuple[list[list[float]], list[list[float]]]:
    """Gives dgc gradients that grow and shrink; returns their norms, by step and bucket, before and after clipping."""
    shapes = ((100, 100), (90, 90), (80, 80))
    with small_layout():
        model, optimizer, hook = with_hook(
            Given(*shapes), settings_of("dgc", clip=1.0), learning_rate=1.0, overlap=True
        )
        before, after = [], []
        for step, size in enumerate((1e-3, 5.0, 1e-2, 1e-4, 1.0)):
            torch.manual_seed(10 * step + rank)
            gradients = [torch.randn(shape) * size * (1 + place) for place, shape in enumerate(shapes)]
            before.append([float(one.norm()) / 2 for one in gradients])
            clipped: list[tuple[int, float]] = []
            encode = hook._reducer._exchanger._sums._encode

            def noted(
                memory: Any, codec: Any, bucket: Any, *more: Any, encode: Any = encode, found: Any = clipped
            ) -> Any:
                found.append((bucket.index, float(bucket.flat.norm())))
                return encode(memory, codec, bucket, *more)

            hook._reducer._exchanger._sums._encode = noted
            optimizer.zero_grad()
            model(gradients).backward()
            hook._reducer._exchanger._sums._encode = encode
            after.append([norm for _, norm in sorted(clipped)])
    return before, after


def go_on_overlapped(rank: int, codec: str, steps: int) -> tuple[list[str], list[str]]:
    """See `go_on`, with overlap and several buckets."""
    with small_layout():
        return go_on(rank, codec, {"clip": 0.01} if codec == "dgc" else {}, steps, overlap=True)


def train_copies(rank: int, codec: str, settings: dict[str, Any], shard: int, overlap: bool) -> list[str]:
    """Trains copies of an FSDP2 model, in so many parts each; returns the digests of this rank's parts."""
    with small_layout():
        torch.manual_seed(7)
        model = Layers()
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shard, shard), mesh_dim_names=("replicate", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        register_fsdp2(
            model, mesh["replicate"], settings_of(codec, **settings), optimizer=optimizer, seed=3, overlap=overlap
        )
        digests = []
        for step in range(5):
            optimizer.zero_grad()
            _pass(model, rank, step)
            optimizer.step()
            parts = [local(parameter.detach()) for parameter in model.parameters()]
            digests.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
        return digests


def _pass(model: nn.Module, rank: int, step: int) -> None:
    """Computes gradients in two passes, of which the first sums nothing."""
    inputs, targets = rows_of(rank, step)
    for part, (some, wanted) in enumerate(zip(inputs.chunk(2), targets.chunk(2), strict=True)):
        model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
        ((model(some) - wanted).square().mean() / 2).backward()


def second_gradient(_: int) -> str:
    """Takes two passes before a step of copies that overlap; returns what is said."""
    torch.manual_seed(7)
    model, mesh = Layers(), init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register_fsdp2(model, mesh["replicate"], "topk", optimizer=optimizer, overlap=True)
    inputs, targets = rows_of(0, 0)
    (model(inputs) - targets).square().mean().backward()
    try:
        (model(inputs) - targets).square().mean().backward()
    except HookUnsupported as error:
        return str(error)
    return ""


def refused_overlap(_: int) -> str:
    """Tries to overlap with a policy that measures."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        hooks.register(model, settings_of("qsgd", policy={"kind": "auto"}), optimizer=optimizer, overlap=True)
    except HookUnsupported as error:
        return str(error)
    return ""
