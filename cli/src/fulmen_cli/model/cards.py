"""Well-known GPUs and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CARDS", "Card"]

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU and its memory as drivers report it, in bytes."""

    name: str
    memory_bytes: int


CARDS: Final = tuple(
    Card(name=name, memory_bytes=mib * _MIB)
    for name, mib in (
        ("RTX 3090 / 4090, 24 GB", 24_564),
        ("L4, 24 GB", 23_034),
        ("RTX 5090, 32 GB", 32_607),
        ("A100, 40 GB", 40_960),
        ("L40S, 48 GB", 46_068),
        ("A100 / H100, 80 GB", 81_559),
        ("H200, 141 GB", 143_771),
        ("B200, 180 GB", 183_359),
        ("MI300X, 192 GB", 196_592),
    )
)
