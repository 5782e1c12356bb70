"""Top-k sparsification with error feedback.

Source: arXiv:1809.07599 (memory). The threshold is that of every so many-th element, or exact. With AdamW it converges
worse than what it saves is worth (docs/exchange.md): its second moment sees what came in bursts.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fulmen_exchange.codecs.codec import CodecEntry
from fulmen_exchange.codecs.sparse import MAX_RATIO, Feedback
from fulmen_exchange.settings import CodecSettings


class TopkSettings(CodecSettings):
    """Settings of `topk`.

    Attributes:
        ratio: Bytes of float32 for each byte that is sent; 1 to 4096, 100 unless given.
        exact: Sorts all elements instead of every so many-th, which is many times as slow; not unless given.
    """

    sgd_only = True
    codec: Literal["topk"] = "topk"
    ratio: float = Field(default=100.0, ge=1, le=MAX_RATIO)
    exact: bool = False


ENTRIES = (CodecEntry(settings=TopkSettings, make=lambda settings: Feedback(name="topk", exact=settings.exact)),)
