"""Stochastic quantisation without bias.

Source: QSGD, arXiv:1610.02132, with the largest magnitude of a block in the place of its L2 norm. It keeps nothing
back: error feedback on a quantiser without bias only hurts (docs/exchange.md).
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
        bits: Of each element, both ways; 4 to 8, 8 unless given.
    """

    has_residual = False
    codec: Literal["qsgd"] = "qsgd"
    bits: int = Field(default=8, ge=4, le=8)


ENTRIES = (CodecEntry(settings=QsgdSettings, make=lambda settings: Stochastic(name="qsgd", bits=settings.bits)),)
