"""The whole command `fulmen`, with every command of every noun."""

from __future__ import annotations

from fulmen_cli.words import WORDS, app_of

__all__ = ["app"]

app = app_of(*WORDS)
