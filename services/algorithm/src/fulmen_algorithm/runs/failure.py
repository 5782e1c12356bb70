"""Errors that end a run, or one execution of it."""

from fulmen.errors import DeadlineExceeded, Unavailable

AWAY: tuple[type[Exception], ...] = (Unavailable, DeadlineExceeded, TimeoutError, OSError)
"""Errors of a call to an unavailable service."""


class RunFailed(Exception):
    """Ends a run as FAILED; the text is shown to users."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TrainerLost(Exception):
    """The trainer has exited or does not answer; the text is shown to users."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
