"""The entry point of the program `fulmen`, which imports what its first word needs."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from fulmen_cli.words import WORDS, app_of, overview

__all__ = ["main"]

EMIT = "emit"
OVERVIEW: Final[tuple[list[str], ...]] = ([], ["--help"], ["--version"])
# The variable by which a shell asks for completions.
COMPLETING = "_FULMEN_COMPLETE"


def main() -> None:
    """Runs the command line."""
    arguments = sys.argv[1:]
    if arguments[:1] != [EMIT]:
        # SIGTERM is handled like Ctrl-C: the command reports what continues without it.
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if COMPLETING in os.environ:
        app = app_of(*WORDS)
    elif arguments in OVERVIEW:
        app = overview()
    elif arguments[:1] and arguments[0] in WORDS:
        app = app_of(arguments[0])
    else:
        # Other options of the program, and words that there are not.
        app = app_of(*WORDS)
    app(prog_name="fulmen")
