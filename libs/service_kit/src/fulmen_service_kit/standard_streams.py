"""Standard streams that never raise and never mix lines: a log on a full disk loses lines and stops no work.

Imports only the standard library, because the heartbeat does.
"""

import contextlib
import sys
import threading
from typing import Any, TextIO

__all__ = ["LossyStream", "never_raise"]

MAX_UNFINISHED = 65_536
"""Characters of a line that are kept until it ends."""


class LossyStream:
    """A text stream whose write errors are counted instead of raised, and whose lines are written whole.

    `print` writes a line and its end one after the other. Where the stream has no buffer (PYTHONUNBUFFERED), another thread,
    process or library would write between the two.

    Attributes:
        lost: Writes that failed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._unfinished = threading.local()
        self.lost = 0

    def write(self, text: str) -> int:
        """Writes text once its line has ended, if it can be written; returns its length."""
        line = getattr(self._unfinished, "text", "") + text
        if line.endswith("\n") or len(line) > MAX_UNFINISHED:
            self._unfinished.text = ""
            self._write(line)
        else:
            self._unfinished.text = line
        return len(text)

    def flush(self) -> None:
        """Flushes what was written, an unfinished line too, if it can be; otherwise it is kept for the next flush."""
        if rest := getattr(self._unfinished, "text", ""):
            self._unfinished.text = ""
            self._write(rest)
        with contextlib.suppress(OSError):
            self._stream.flush()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except OSError:
            self.lost += 1

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
