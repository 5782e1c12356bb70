"""What a turn does; the standard library alone, since each queue's own environment reads it, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INPUT = {"question": "What is 17 + 25?", "pad": "x" * 300}
MAX_AHEAD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many producers, each of which waits until its jobs are committed before it enqueues the next, for `seconds`."""

    producers: int
    per_request: int
    seconds: float


Settings = dict[str, Any]
