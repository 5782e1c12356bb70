"""Norms of gradients, the same on every rank of a copy, whatever it is spread over."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fulmen_algorithm.training.parallel import RankGroups
from fulmen_algorithm.training.tensor_parallel import scale_to, split_norm


def gradient_norm(parameters: Sequence[nn.Parameter], groups: RankGroups | None = None) -> float:
    """Computes the global norm of all gradients, the same on every rank of a copy."""
    if groups is not None and groups.tensor_mesh is not None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        return split_norm(gradients, groups.copy, groups.tensor)
    return _whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, groups: RankGroups | None = None) -> float:
    """Scales gradients down to a global norm over all parameters; returns the norm before, the same on every rank."""
    if groups is not None and groups.tensor_mesh is not None:
        norm = gradient_norm(parameters, groups)
        scale_to([p.grad for p in parameters if p.grad is not None], norm, max_norm)
        return norm
    return _whole(nn.utils.clip_grad_norm_(parameters, max_norm))


def _whole(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
