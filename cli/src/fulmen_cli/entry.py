"""Where the program `fulmen` begins: agents that call `fulmen emit` do not wait until all other commands are imported."""

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

        app = typer.Typer(pretty_exceptions_enable=False)
        # Without a callback typer would take the only group for the program itself.
        app.callback()(lambda: None)
        emit.register(app)
        app(prog_name="fulmen")
        return
    # SIGTERM is handled like Ctrl-C: the command reports what continues without it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    from fulmen_cli.main import main as run

    run()
