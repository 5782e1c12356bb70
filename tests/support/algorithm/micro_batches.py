"""Micro-batches of rows for a single rank."""

from collections.abc import Sequence

from fulmen_algorithm.training.packing import MicroBatch, micro_batch, plan
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import PackingMode


def pack(rows: Sequence[Row], *, token_budget: int, pad_token_id: int, mode: PackingMode) -> list[MicroBatch]:
    """Returns all micro-batches; see `plan`."""
    layouts = plan(rows, token_budget=token_budget, mode=mode)
    return [micro_batch(rows, layout, pad_token_id=pad_token_id, mode=mode) for layout in layouts]
