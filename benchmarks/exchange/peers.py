"""PyTorch's own exchange: DistributedDataParallel as it is, and its hooks, stock but for what does not run on a CPU.

`bf16_compress_hook` is refused without CUDA by a comparison of its name, although Gloo sums bfloat16: here it has another
name, and nothing else is changed. `powerSGD_hook` issues its sums from callbacks, whose order is not the same on all
ranks, so that Gloo aborts the process with more than one bucket: here all gradients are one.
"""

# Annotations are what DDP compares: no `from __future__ import annotations` here.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

ONE_BUCKET_MB = 4096
POWERSGD_FROM = 2
"""Step from which it compresses: the first two are dense, and DDP rebuilds its buckets after the first."""


def bf16_by_another_name(
    state: dist.ProcessGroup,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Does what the stock hook does."""
    return default_hooks.bf16_compress_hook(state, bucket)


def wrapped(model: nn.Module, what: str) -> nn.Module:
    """Gives a model an exchange of PyTorch's; all ranks hold the same weights already."""
    group = dist.group.WORLD
    if what == "powersgd":
        module = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=POWERSGD_FROM)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return module
    module = DistributedDataParallel(model, init_sync=False)
    if what == "bf16":
        module.register_comm_hook(group, bf16_by_another_name)
    return module
