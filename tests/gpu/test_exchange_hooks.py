"""Torch's own DDP with its gradients through a codec, on a GPU and NCCL: the steps of DDP without, and of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fulmen_exchange import hooks
from fulmen_exchange.registry import load_codecs
from tests.support.exchange.hook_ranks import SMALL_BUCKETS, Layers, rows_of, settings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]
STEPS = 20


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Yields a group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def trained(codec: str | None, *, device: str = "cuda", **ddp: bool) -> tuple[torch.Tensor, list[float]]:
    """Trains; returns all weights, and the losses."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Layers().to(device), bucket_cap_mb=SMALL_BUCKETS, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if codec is not None:
        hooks.register(model, settings_of(codec, check_every=5), optimizer=optimizer, seed=3)
    losses = []
    for step in range(STEPS):
        inputs, targets = (rows.to(device) for rows in rows_of(0, step))
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu(), losses


@pytest.mark.parametrize("views", [False, True])
def test_uncompressed_it_takes_the_steps_of_plain_ddp(group: dist.ProcessGroup, views: bool) -> None:
    plain, _ = trained(None, gradient_as_bucket_view=views)
    torch.testing.assert_close(trained("none", gradient_as_bucket_view=views)[0], plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", sorted(load_codecs()))
def test_every_codec_trains(group: dist.ProcessGroup, codec: str) -> None:
    weights, losses = trained(codec)
    assert bool(weights.isfinite().all())
    assert losses[-1] < 0.8 * losses[0]
