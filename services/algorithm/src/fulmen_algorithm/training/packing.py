# ruff: noqa: N815 (tensor names end with their shape)
"""Micro-batches: every token of every row is in exactly one of them, and none is larger than the budget.

Legend: B lines, T positions of a line. A padded micro-batch has one row per line; a packed one has a single line in
which rows follow each other and positions restart at 0 (attention never crosses a restart).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from fulmen_algorithm.training.rows import NO_VERSION, Row


class PackingMode(StrEnum):
    """How rows share a micro-batch."""

    PADDED = "padded"
    PACKED = "packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass; every field but the two optional ones has shape [B, T].

    Attributes:
        input_ids_BT: int64 token ids; padding holds the padding id.
        position_ids_BT: int64 positions, restarting at 0 with every row.
        attention_mask_BT: int64, 1 for tokens and 0 for padding; None if packed (positions tell the rows apart).
        loss_mask_BT: bool, true where the token trains.
        old_logprobs_BT: float32 log-probabilities under the sampling policy.
        advantages_BT: float32 advantage of the row, 0 at padding.
        versions_BT: int64 policy versions, `NO_VERSION` where no policy sampled.
        row_index_BT: int64 index of the row in the sequence that was packed, -1 at padding.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    loss_mask_BT: Tensor
    old_logprobs_BT: Tensor
    advantages_BT: Tensor
    versions_BT: Tensor
    row_index_BT: Tensor

    @property
    def size_tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids_BT.numel()


def pack(
    rows: Sequence[Row], *, token_budget: int, pad_token_id: int, mode: PackingMode = PackingMode.PADDED
) -> list[MicroBatch]:
    """Distributes rows over micro-batches of at most `token_budget` positions each.

    Padded micro-batches take rows in order of length, so that little is padded; packed ones take the first
    micro-batch with room (first fit, decreasing). The result depends on nothing but the arguments.

    Args:
        rows: R rows.
        token_budget: Largest number of positions of a micro-batch, padding included.
        pad_token_id: Id for padding positions.
        mode: Padded or packed.

    Raises:
        ValueError: if a row alone is longer than the budget.
    """
    for index, row in enumerate(rows):
        if len(row.token_ids) > token_budget:
            raise ValueError(f"Row {index} has {len(row.token_ids)} tokens; the budget is {token_budget}.")
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].token_ids), i))
    match mode:
        case PackingMode.PADDED:
            return [_padded(rows, bin_, pad_token_id) for bin_ in _bins_padded(rows, order, token_budget)]
        case PackingMode.PACKED:
            return [_packed(rows, bin_) for bin_ in _bins_packed(rows, order, token_budget)]


def _bins_padded(rows: Sequence[Row], order: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in order:
        # Rows come longest first, so the first row of a bin is its width.
        if bins and (len(bins[-1]) + 1) * len(rows[bins[-1][0]].token_ids) <= budget:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def _bins_packed(rows: Sequence[Row], order: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = len(rows[index].token_ids)
        target = next((b for b, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([])
            room.append(budget)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= length
    return bins


def _padded(rows: Sequence[Row], indices: Sequence[int], pad_token_id: int) -> MicroBatch:
    width = max(len(rows[i].token_ids) for i in indices)
    lengths = [len(rows[i].token_ids) for i in indices]

    def padded(values: Sequence[Sequence[float]], filler: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*v, *[filler] * (width - len(v))] for v in values], dtype=dtype)

    return MicroBatch(
        input_ids_BT=padded([rows[i].token_ids for i in indices], pad_token_id, torch.int64),
        position_ids_BT=padded([range(n) for n in lengths], 0, torch.int64),
        attention_mask_BT=padded([[1] * n for n in lengths], 0, torch.int64),
        loss_mask_BT=padded([rows[i].loss_mask for i in indices], False, torch.bool),
        old_logprobs_BT=padded([rows[i].old_logprobs for i in indices], 0.0, torch.float32),
        advantages_BT=padded(
            [[rows[i].advantage] * n for i, n in zip(indices, lengths, strict=True)], 0.0, torch.float32
        ),
        versions_BT=padded([rows[i].policy_versions for i in indices], NO_VERSION, torch.int64),
        row_index_BT=padded([[i] * n for i, n in zip(indices, lengths, strict=True)], -1, torch.int64),
    )


def _packed(rows: Sequence[Row], indices: Sequence[int]) -> MicroBatch:
    def joined(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[x for v in values for x in v]], dtype=dtype)

    lengths = [len(rows[i].token_ids) for i in indices]
    return MicroBatch(
        input_ids_BT=joined([rows[i].token_ids for i in indices], torch.int64),
        position_ids_BT=joined([range(n) for n in lengths], torch.int64),
        attention_mask_BT=None,
        loss_mask_BT=joined([rows[i].loss_mask for i in indices], torch.bool),
        old_logprobs_BT=joined([rows[i].old_logprobs for i in indices], torch.float32),
        advantages_BT=joined([[rows[i].advantage] * n for i, n in zip(indices, lengths, strict=True)], torch.float32),
        versions_BT=joined([rows[i].policy_versions for i in indices], torch.int64),
        row_index_BT=joined([[i] * n for i, n in zip(indices, lengths, strict=True)], torch.int64),
    )
