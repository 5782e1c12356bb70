"""Texts that a terminal shows and does not obey, whoever wrote them: agents, models, other services."""

from __future__ import annotations

import unicodedata
from typing import Final

__all__ = ["printable"]

_KEPT: Final = frozenset("\n\t\u200c\u200d")
"""With the joiners of scripts and emoji."""
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: controls, formats such as a change of direction, surrogates, separators of lines."""


def printable(text: str) -> str:
    """Returns a text in which line breaks and tabs are the only control characters."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in _HIDDEN and sign not in _KEPT else sign
        for sign in text
    )
