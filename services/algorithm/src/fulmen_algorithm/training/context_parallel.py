# ruff: noqa: N803, N806 (tensor names end with their shape)
"""Context parallelism: ranks that compute the same lines together, each a part of the positions.

A line has 2N chunks for N ranks. Rank i computes the i-th from the beginning and the i-th from the end, so that causal
attention costs every rank the same. In each layer keys and values are gathered from all ranks, and a chunk attends to those
up to its end, by the rows of the library's own mask that are its. Gradients of keys and values are summed over the ranks on
the way back. What is computed position by position stays where it is. Invariant: the gradients of the ranks' weights add up
to those of one process, since each is of the outputs at its own positions alone.

Source: The Llama 3 Herd of Models (arXiv:2407.21783), section 3.3.2.

Legend: B lines, T positions of a line, Q positions of a rank, H heads, S positions of all ranks, D width of a head.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    eager_mask,
    find_packed_sequence_indices,
    packed_sequence_compatibility_function,
    sdpa_mask,
)

from fulmen_exchange.ranks import Ranks

_PREFIX = "context_"
"""What the name of an attention has before it where it gathers keys and values."""
_INNER = ("sdpa", "eager")
ALIGNED = 8
"""Chunks have a multiple of so many positions: kernels of GPUs copy masks of other widths, in every layer."""


class ContextUnsupported(ValueError):
    """The rows of a model cannot be split by positions."""


class ContextSplit:
    """How the positions of some lines are dealt to the ranks of a group."""

    def __init__(self, ranks: Ranks, position_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> None:
        """Deals lines.

        Args:
            ranks: The group.
            position_ids_BT: Positions, which restart with every row of a packed line.
            attention_mask_BT: 1 for tokens and 0 for padding; None if packed.
        """
        self.ranks, self.width = ranks, position_ids_BT.shape[1]
        chunks = 2 * ranks.world_size
        self.chunk = ALIGNED * -(-self.width // (chunks * ALIGNED))
        self.mine = (ranks.rank, chunks - 1 - ranks.rank)
        # As elsewhere, padding at the end of a line has position 0, and so attends only to itself.
        self._positions_BS = self._filled(position_ids_BT)
        self._present_BS = None if attention_mask_BT is None else self._filled(attention_mask_BT).bool()
        self._rows_BS = find_packed_sequence_indices(self._positions_BS) if attention_mask_BT is None else None

    def take(self, values_BT: Tensor) -> Tensor:
        """Returns this rank's part of what there is of each position, [B, Q]; 0 behind the end of a line."""
        filled_BS = self._filled(values_BT)
        return torch.cat([filled_BS[:, n * self.chunk : (n + 1) * self.chunk] for n in self.mine], dim=1)

    def join(self, values_BQ: Tensor) -> Tensor:
        """Returns what all ranks have of each position, [B, T]; the same bits on each.

        The gradient is that of this rank's part alone: all ranks compute the same from the result.
        """
        own_BQ = values_BQ.detach().contiguous()
        parts = [torch.empty_like(own_BQ) for _ in range(self.ranks.world_size)]
        dist.all_gather(parts, own_BQ, group=self.ranks.group)
        parts[self.ranks.rank] = values_BQ
        return self._in_order(parts, dim=1)[:, : self.width]

    def gather(self, keys_BHQD: Tensor, values_BHQD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all ranks, [B, H, S, D]; their gradients are summed over the ranks."""
        # Keys may be float32 under autocast, where attention is computed in the type of values.
        both = torch.cat([keys_BHQD.to(values_BHQD.dtype), values_BHQD], dim=-1)
        whole = self._in_order(_Gathered.apply(both, self.ranks).unbind(), dim=2)
        keys_BHSD, values_BHSD = whole.split([keys_BHQD.shape[-1], values_BHQD.shape[-1]], dim=-1)
        return keys_BHSD, values_BHSD

    def mask(self, made: Callable[..., Tensor], *, mask_function: Callable[..., Any], **asked: Any) -> "PartMask":
        """Builds the rows of a mask that are this rank's.

        Args:
            made: The library's function that builds a mask.
            mask_function: Says of a position in a row, and of another, whether the first attends to the second.
            asked: What else `made` is called with.
        """
        if self._rows_BS is not None:
            mask_function = packed_sequence_compatibility_function(mask_function, self._positions_BS, self._rows_BS)
        asked |= {"attention_mask": self._present_BS, "mask_function": mask_function, "allow_is_causal_skip": False}
        size = self.chunk
        chunks = [{"q_length": size, "q_offset": n * size, "kv_length": (n + 1) * size} for n in self.mine]
        return PartMask(self, [made(**(asked | chunk)) for chunk in chunks])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Makes the model's masks those of this rank's positions, and so its attention one over all ranks."""
        token = _SPLIT.set(self)
        try:
            yield
        finally:
            _SPLIT.reset(token)

    def _filled(self, values_BT: Tensor) -> Tensor:
        missing = 2 * self.ranks.world_size * self.chunk - self.width
        return torch.cat([values_BT, values_BT.new_zeros(len(values_BT), missing)], dim=1)

    def _in_order(self, parts: Sequence[Tensor], *, dim: int) -> Tensor:
        """Puts the chunks of all ranks where they belong."""
        first = [part.narrow(dim, 0, self.chunk) for part in parts]
        last = [part.narrow(dim, self.chunk, self.chunk) for part in reversed(parts)]
        return torch.cat(first + last, dim=dim)


def split_of(ranks: Ranks, position_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> ContextSplit | None:
    """Returns how lines are dealt to the ranks of a group; None if there is none."""
    return None if ranks.group is None else ContextSplit(ranks, position_ids_BT, attention_mask_BT)


_SPLIT: ContextVar[ContextSplit | None] = ContextVar("split", default=None)


class PartMask:
    """The rows of a mask that are of a rank's chunks, each for the keys up to the chunk's end.

    It goes through the model in place of a mask, so that a layer that is computed again has it.
    """

    def __init__(self, split: ContextSplit, masks: Sequence[Tensor]) -> None:
        """Holds masks of shape [B, 1, chunk, keys]."""
        # Where lines do not differ, one stands for all.
        self.split, self._masks = split, [mask if mask.stride(0) else mask[:1] for mask in masks]

    def added(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Returns what is added to the scores of each chunk.

        It is the same tensor for all layers: of masks that are true or false torch makes one for each, and keeps it.
        """
        if self._masks[0].dtype is not dtype:
            self._masks = [
                torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
                if mask.dtype is torch.bool
                else mask.to(dtype)
                for mask in self._masks
            ]
        return self._masks


# The newer of torch's two names, if available.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gathered(torch.autograd.Function):
    """The parts of all ranks, [N, ...]; the backward pass sums over the ranks, in float32.

    Of torch's own, `torch.distributed.nn.functional.all_gather` takes no group but that of all ranks on Gloo, and
    the functional collectives changed their names between the releases that are supported.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        parts = part.new_empty(ranks.world_size, *part.shape)
        _all_gather(parts.flatten(0, 1), part.contiguous(), group=ranks.group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [gradient] = gradients
        summed = gradient.new_empty(gradient.shape[1:], dtype=torch.float32)
        _reduce_scatter(summed, gradient.float().contiguous().flatten(0, 1), group=ctx.ranks.group)
        return summed.to(gradient.dtype), None


def split_positions(model: PreTrainedModel) -> None:
    """Prepares a model for lines that are split by positions; without one in use it computes as before.

    Raises:
        ContextUnsupported: if its attention is not one of the library's interface, or convolutions mix positions.
    """
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    attention = str(inner.config._attn_implementation)
    if attention not in _INNER:
        raise ContextUnsupported(f"Rows cannot be split by positions with attention {attention}.")
    if not inner._supports_attention_backend:
        raise ContextUnsupported("Rows cannot be split by positions: the model's attention cannot be replaced.")
    if any(isinstance(part, nn.Conv1d) for part in inner.modules()):
        raise ContextUnsupported("Rows cannot be split by positions: the model's convolutions mix them.")
    inner.set_attn_implementation(_PREFIX + attention)
    if inner.config._attn_implementation != _PREFIX + attention:
        raise ContextUnsupported("Rows cannot be split by positions: the model's attention is its own.")


def inner_name(attention: str) -> str:
    """Returns the name of the attention by which a chunk is computed."""
    return attention.removeprefix(_PREFIX)


def _mask(made: Callable[..., Any], **asked: Any) -> Any:
    split = _SPLIT.get()
    return made(**asked) if split is None else split.mask(made, **asked)


def _attend(
    inner: Callable[..., Any],
    module: nn.Module,
    query_BHQD: Tensor,
    key_BHQD: Tensor,
    value_BHQD: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(attention_mask, PartMask):
        found: tuple[Tensor, Tensor | None] = inner(module, query_BHQD, key_BHQD, value_BHQD, attention_mask, **options)
        return found
    split = attention_mask.split
    keys_BHSD, values_BHSD = split.gather(key_BHQD, value_BHQD)
    outputs = []
    queries, masks = query_BHQD.split(split.chunk, dim=2), attention_mask.added(value_BHQD.dtype)
    for query, mask in zip(queries, masks, strict=True):
        end = mask.shape[-1]
        outputs.append(inner(module, query, keys_BHSD[:, :, :end], values_BHSD[:, :, :end], mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _eager(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Calls the function that the library has for attention of this kind beside its model."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"](module, *inputs, **options)


for _name, _attention, _made in (("sdpa", sdpa_attention_forward, sdpa_mask), ("eager", _eager, eager_mask)):
    AttentionInterface.register(_PREFIX + _name, partial(_attend, _attention))
    AttentionMaskInterface.register(_PREFIX + _name, partial(_mask, _made))
