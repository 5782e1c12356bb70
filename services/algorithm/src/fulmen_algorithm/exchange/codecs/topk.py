"""Top-k sparsification with error feedback.

Source: arXiv:1809.07599 (memory). The threshold is that of every so many-th element, or exact. With AdamW it converges
worse than what it saves is worth (docs/exchange.md): its second moment sees what came in bursts.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fulmen_algorithm.exchange.codec import CodecEntry
from fulmen_algorithm.exchange.codecs.sparse import Feedback
from fulmen_algorithm.exchange.settings import CodecSettings


class TopkSettings(CodecSettings):
    """Settings of `topk`.

    Attributes:
        ratio: Bytes of float32 for each byte that is sent.
        exact: Sorts all elements instead of every so many-th; many times as slow.
    """

    codec: Literal["topk"] = "topk"
    ratio: float = Field(default=100.0, ge=1, le=100_000)
    exact: bool = False


ENTRIES = (CodecEntry(settings=TopkSettings, make=lambda settings: Feedback(name="topk", exact=settings.exact)),)
