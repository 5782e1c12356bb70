# ruff: noqa: N806, N815 (tensor names end with their shape)
"""Micro-batches: every row is in exactly one, and none exceeds the token budget.

Legend: B lines, T positions of a line. A line of a padded micro-batch is one row; in a packed one several rows
share a line as long as they fit, and positions restart at 0 (attention never crosses a restart). A line is as
long as the micro-batch's longest row, so attention costs no more than with padding, and less is padded.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulmen.routed_experts import RoutedExperts
from fulmen_algorithm.training.router_replay import routed_tensor
from fulmen_algorithm.training.rows import NO_VERSION, Row
from fulmen_algorithm.training.settings import PackingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass; every field but the optional one has shape [B, T].

    Attributes:
        input_ids_BT: int64 token ids; padding holds the padding id.
        position_ids_BT: int64 positions, restarting at 0 with every row.
        attention_mask_BT: int64, 1 for tokens and 0 for padding; None if packed (positions separate the rows).
        loss_mask_BT: bool, true where the token trains.
        old_logprobs_BT: float32 log-probabilities under the sampling policy.
        advantages_BT: float32 advantage of each token, 0 where it does not train.
        versions_BT: int64 policy versions, `NO_VERSION` where no policy sampled.
        row_index_BT: int64 index of the row in the sequence that was packed, -1 at padding.
        routed_BTLK: int32 experts of each token, `router_replay.UNKNOWN` where they are not known; None if no row has any.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    loss_mask_BT: Tensor
    old_logprobs_BT: Tensor
    advantages_BT: Tensor
    versions_BT: Tensor
    row_index_BT: Tensor
    routed_BTLK: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether it holds no row: an empty micro-batch, run so that every rank enters the same collectives."""
        return bool((self.row_index_BT < 0).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the rows of one micro-batch go.

    Attributes:
        width: Positions of a line.
        lines: Indices of the rows in each line.
    """

    width: int
    lines: tuple[tuple[int, ...], ...]

    @property
    def size_tokens(self) -> int:
        """Positions computed, padding included."""
        return self.width * len(self.lines)

    def renumbered(self, indices: Sequence[int]) -> "Layout":
        """Returns a layout of a subset of rows with their indices among all rows."""
        return Layout(width=self.width, lines=tuple(tuple(indices[i] for i in line) for line in self.lines))


def plan(rows: Sequence[Row], *, token_budget: int, mode: PackingMode = PackingMode.PACKED) -> list[Layout]:
    """Distributes rows over micro-batches of at most `token_budget` positions each.

    Rows are taken in order of length, the longest first. Padded, each is a line; packed, it goes into the line in which
    it leaves the least room (best fit, decreasing). The result depends only on the arguments.

    Raises:
        ValueError: if a single row is longer than the budget.
    """
    for index, row in enumerate(rows):
        if len(row.token_ids) > token_budget:
            raise ValueError(f"Row {index} has {len(row.token_ids)} tokens; the budget is {token_budget}.")
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].token_ids), i))
    batches: list[tuple[int, list[list[int]]]] = []
    gaps: list[tuple[int, int, int]] = []  # room, micro-batch and line of each line with room
    for index in order:
        length = len(rows[index].token_ids)
        found = bisect_left(gaps, (length, 0, 0)) if mode is PackingMode.PACKED else len(gaps)
        if found < len(gaps):
            room, batch, line = gaps.pop(found)
            batches[batch][1][line].append(index)
        else:
            if not batches or (len(batches[-1][1]) + 1) * batches[-1][0] > token_budget:
                batches.append((length, []))
            room, batch, line = batches[-1][0], len(batches) - 1, len(batches[-1][1])
            batches[-1][1].append([index])
        if room > length:
            insort(gaps, (room - length, batch, line))
    return [Layout(width=width, lines=tuple(map(tuple, lines))) for width, lines in batches]


def micro_batch(rows: Sequence[Row], layout: Layout, *, pad_token_id: int, mode: PackingMode) -> MicroBatch:
    """Builds the tensors of one micro-batch."""
    lengths = [[len(rows[i].token_ids) for i in line] for line in layout.lines]

    def filled(values: Sequence[Sequence[Sequence[float]]], filler: float, dtype: torch.dtype) -> Tensor:
        lines = [[x for part in line for x in part] for line in values]
        return torch.tensor([[*line, *[filler] * (layout.width - len(line))] for line in lines], dtype=dtype)

    def column(name: str, filler: float, dtype: torch.dtype) -> Tensor:
        return filled([[getattr(rows[i], name) for i in line] for line in layout.lines], filler, dtype)

    attention = None
    if mode is PackingMode.PADDED:
        attention = filled([[[1] * n for n in line] for line in lengths], 0, torch.int64)
    indices = [[[i] * n for i, n in zip(line, ns, strict=True)] for line, ns in zip(layout.lines, lengths, strict=True)]
    return MicroBatch(
        input_ids_BT=column("token_ids", pad_token_id, torch.int64),
        # Padding has position 0 as well, so it attends only to itself.
        position_ids_BT=filled([[range(n) for n in line] for line in lengths], 0, torch.int64),
        attention_mask_BT=attention,
        loss_mask_BT=column("loss_mask", False, torch.bool),
        old_logprobs_BT=column("old_logprobs", 0.0, torch.float32),
        advantages_BT=column("advantages", 0.0, torch.float32),
        versions_BT=column("policy_versions", NO_VERSION, torch.int64),
        row_index_BT=filled(indices, -1, torch.int64),
        routed_BTLK=_routed(rows, layout),
    )


def _routed(rows: Sequence[Row], layout: Layout) -> Tensor | None:
    placed: list[tuple[RoutedExperts | None, int]] = []
    for line in layout.lines:
        placed += [(rows[i].routed_experts, len(rows[i].token_ids)) for i in line]
        placed.append((None, layout.width - sum(len(rows[i].token_ids) for i in line)))
    routed_NLK = routed_tensor([experts for experts, _ in placed], [length for _, length in placed])
    return None if routed_NLK is None else routed_NLK.unflatten(0, (len(layout.lines), layout.width))


def empty_micro_batch(*, pad_token_id: int) -> MicroBatch:
    """Builds an empty micro-batch of two padding positions."""
    zeros, shape = torch.zeros(1, 2), (1, 2)
    return MicroBatch(
        input_ids_BT=torch.full(shape, pad_token_id, dtype=torch.int64),
        position_ids_BT=torch.zeros(shape, dtype=torch.int64),
        attention_mask_BT=None,
        loss_mask_BT=torch.zeros(shape, dtype=torch.bool),
        old_logprobs_BT=zeros,
        advantages_BT=zeros,
        versions_BT=torch.full(shape, NO_VERSION, dtype=torch.int64),
        row_index_BT=torch.full(shape, -1, dtype=torch.int64),
    )


def spread(batch: MicroBatch, values: Sequence[Sequence[float]]) -> Tensor:
    """Arranges per-token values of the rows like the micro-batch."""
    spread_BT = torch.zeros(batch.input_ids_BT.shape, dtype=torch.float32)
    for index in batch.row_index_BT.unique().tolist():
        if index >= 0:
            # Tokens of a row are contiguous and in order, so a boolean selection keeps their order.
            spread_BT[batch.row_index_BT == index] = torch.tensor(values[index], dtype=torch.float32)
    return spread_BT
