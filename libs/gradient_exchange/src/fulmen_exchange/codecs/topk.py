"""Top-k sparsification with error feedback.

Source: arXiv:1809.07599 (memory). The threshold is estimated from a sample, or exact. Not worth it with AdamW
(docs/exchange.md), whose second moment sees bursts.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fulmen_exchange.codecs.codec import CodecEntry
from fulmen_exchange.codecs.narrow import StateKind, narrowed
from fulmen_exchange.codecs.sparse import MAX_RATIO, Feedback
from fulmen_exchange.codecs.union import reply_of
from fulmen_exchange.settings import CodecSettings


class TopkSettings(CodecSettings):
    """Settings of `topk`.

    Attributes:
        ratio: Bytes of float32 per byte sent; 1 to 4096, default 100.
        ratio_down: The same for the sum that is sent back, reached when `ratio` is; the rest stays at the shard. None sends
            everything that ranks have sent, at most every element in bfloat16; 1 to 4096, default None.
        min_threshold: Magnitude below which an element is not sent, whatever the ratio, until a flush; default 0, for none.
        residual: Number format of the residual on the rank, and of its momentum; `bfloat16` needs half the memory and some time, and
            is rounded stochastically without bias; default `float32`.
        exact: Whether to sort all elements instead of a sample, which is many times slower; default False.
    """

    sgd_only = True
    codec: Literal["topk"] = "topk"
    ratio: float = Field(default=100.0, ge=1, le=MAX_RATIO)
    residual: StateKind = "float32"
    min_threshold: float = Field(default=0.0, ge=0)
    ratio_down: float | None = Field(default=None, ge=1, le=MAX_RATIO)
    exact: bool = False


ENTRIES = (
    CodecEntry(
        settings=TopkSettings,
        make=lambda settings: narrowed(
            Feedback(
                name="topk",
                exact=settings.exact,
                min_threshold=settings.min_threshold,
                down=reply_of(settings.ratio, settings.ratio_down, exact=settings.exact),
            ),
            settings.residual,
        ),
    ),
)
