"""Keeps what the runner's parts log, and agents and graders print, out of what a command prints."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from fulmen_cli.command import Output

__all__ = ["prints_beside", "quieten_runner"]


def quieten_runner() -> None:
    """Sends what the runner's parts log to standard error, from warnings on; its news concern who runs runners."""
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def prints_beside(output: Output) -> AbstractContextManager[Any]:
    """Sends to standard error what is printed meanwhile, where standard output is to be a document and no more."""
    return redirect_stdout(sys.stderr) if output is Output.JSON else nullcontext()
