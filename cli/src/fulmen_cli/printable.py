"""Texts that a terminal shows and does not obey, whoever wrote them: agents, models, other services."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Returns a text in which line breaks and tabs are the only control characters."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
