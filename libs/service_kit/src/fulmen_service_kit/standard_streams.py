"""Standard streams that never raise: a log on a full disk loses lines and stops no work.

Imports only the standard library, because the heartbeat does.
"""

import contextlib
import sys
from typing import Any, TextIO

__all__ = ["LossyStream", "never_raise"]


class LossyStream:
    """A text stream whose write errors are counted instead of raised.

    Attributes:
        lost: Writes that failed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        """Writes text, if it can be written; returns its length."""
        try:
            self._stream.write(text)
        except OSError:
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Flushes what was written, if it can be; otherwise it is kept for the next flush."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def never_raise() -> LossyStream:
    """Makes `sys.stdout` and `sys.stderr` streams that never raise; returns the latter."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            setattr(sys, name, LossyStream(stream))
    assert isinstance(sys.stderr, LossyStream)
    return sys.stderr
