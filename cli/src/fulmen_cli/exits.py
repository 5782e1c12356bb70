"""Exit codes of the command line, and how every error becomes one clear message and one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

import typer

from fulmen.errors import Code, FulmenError, Unavailable
from fulmen.train_toml.train import ConfigError
from fulmen_cli.local.errors import PortInUseError, StackError, StackRunningError
from fulmen_cli.local.postgres import EmbeddedPostgresError
from fulmen_cli.printable import printable

__all__ = ["CommandFailed", "Exit", "reported"]


class Exit(IntEnum):
    """What the exit status of `fulmen` means."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4


# What a shell expects of a program that Ctrl-C has ended: 128 + SIGINT.
INTERRUPTED: Final = 130


class CommandFailed(Exception):
    """Raised by a command that cannot do its job; the text is for a person."""

    def __init__(self, message: str, *, exit_code: Exit = Exit.FAILED) -> None:
        """Keeps the message and the exit status."""
        super().__init__(message)
        self.exit_code = exit_code


_BY_CODE = {
    Code.INVALID_ARGUMENT: Exit.USAGE,
    Code.NOT_FOUND: Exit.NOT_FOUND,
    Code.ALREADY_EXISTS: Exit.CONFLICT,
    Code.ABORTED: Exit.CONFLICT,
    Code.FAILED_PRECONDITION: Exit.CONFLICT,
}
_ADVICE = {
    Code.UNAUTHENTICATED: "Give a token with --token or FULMEN_TOKEN; create one with `fulmen token`.",
    Code.PERMISSION_DENIED: "Use a token of another role or project: `fulmen token issue`, or `fulmen token --role admin`.",
    Code.INTERNAL: "This is a bug in the service: see `fulmen logs SERVICE`.",
    Code.DEADLINE_EXCEEDED: "See `fulmen status`, then try again.",
}
_UNREACHABLE = "Check `fulmen status`; start the stack with `fulmen up`."


@contextmanager
def reported() -> Iterator[None]:
    """Turns every expected error into a message on standard error and an exit status."""
    try:
        yield
    except FulmenError as error:
        _fail(_describe(error), _BY_CODE.get(error.code, Exit.FAILED))
    except ConfigError as error:
        _fail(str(error), Exit.USAGE)
    except CommandFailed as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (StackRunningError, PortInUseError) as error:
        _fail(str(error), Exit.CONFLICT)
    except (StackError, EmbeddedPostgresError) as error:
        _fail(str(error), Exit.FAILED)


def _describe(error: FulmenError) -> str:
    if isinstance(error, Unavailable):
        return f"{error.message}\n{_UNREACHABLE}"
    advice = _ADVICE.get(error.code)
    return f"{error}\n{advice}" if advice else str(error)


def _fail(message: str, code: Exit) -> None:
    sys.stderr.write(f"error: {printable(message)}\n")
    raise typer.Exit(int(code))
