"""How much padding a training will have, computed before it is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["packing_share"]

ROWS_READ: Final = 1024
"""Demonstrations that are tokenised."""


def packing_share(settings: Any, model_dir: Path, demonstrations: Sequence[Mapping[str, Any]]) -> float | None:
    """Computes the share of tokens among positions in the first batches of `sft`, packed as the trainer does; blocks.

    Args:
        settings: Settings of `sft`.
        model_dir: Folder with the model's tokenizer.
        demonstrations: Conversations.

    Returns:
        None if the folder has no tokenizer, or if it cannot render a demonstration: the run reports the reason.
    """
    from transformers import AutoTokenizer

    from fulmen_algorithm.training.packing import plan
    from fulmen_algorithm.training.rows import sft_row

    tokens, positions, count = 0, 0, len(demonstrations)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        for step in range(max(1, min(count, ROWS_READ) // settings.batch_size)):
            examples = [demonstrations[index] for index in settings.batch(step, count)]
            rows = [sft_row(tokenizer, each["messages"], row_id="1", tools=each.get("tools")) for each in examples]
            tokens += sum(len(row.token_ids) for row in rows)
            positions += sum(layout.size_tokens for layout in plan(rows, token_budget=settings.token_budget))
    except (OSError, ValueError):
        return None
    return tokens / positions
