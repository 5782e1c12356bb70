"""The entry point of the program `fulmen`. `fulmen emit`, which agents call, starts without importing the other commands."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]

EMIT = "emit"


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == [EMIT]:
        import typer

        from fulmen_cli.agent import emit

        small = typer.Typer(pretty_exceptions_enable=False)
        # Without a callback typer treats a single group as the program itself.
        small.callback()(lambda: None)
        emit.register(small)
        small(prog_name="fulmen")
        return
    # SIGTERM is handled like Ctrl-C: the command reports what continues without it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    from fulmen_cli.main import app

    app()
