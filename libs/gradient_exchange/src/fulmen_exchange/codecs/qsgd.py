"""Unbiased stochastic quantisation.

Source: QSGD, arXiv:1610.02132, with the largest magnitude of a block instead of its L2 norm. There is no residual: error
feedback only hurts an unbiased quantiser (docs/exchange.md).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fulmen_exchange.codecs.codec import CodecEntry
from fulmen_exchange.codecs.quantised import Stochastic
from fulmen_exchange.settings import CodecSettings


class QsgdSettings(CodecSettings):
    """Settings of `qsgd`.

    Attributes:
        bits: Bits per element, in both directions; 4 to 8, default 8.
    """

    has_residual = False
    codec: Literal["qsgd"] = "qsgd"
    bits: int = Field(default=8, ge=4, le=8)


ENTRIES = (CodecEntry(settings=QsgdSettings, make=lambda settings: Stochastic(name="qsgd", bits=settings.bits)),)
