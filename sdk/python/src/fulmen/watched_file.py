"""A file that may be replaced at runtime: a secret, a certificate."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_S: Final = 1.0
"""Minimum interval between checks of a file, seconds."""

_log = logging.getLogger(__name__)


class WatchedFile:
    """The content of a file, read again after a change.

    The file is checked on access, at most once per second. If it is missing or unreadable, the last content stays in
    use and the problem is logged: a file that is replaced in two steps must not stop a service.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Raises:
            OSError: if it cannot be read.
        """
        self._path = Path(path)
        self._clock = clock
        self._seen = _mark(self._path.stat())
        self._content = self._path.read_bytes()
        self._look_at_s = clock() + LOOK_S
        self._is_lost = False
        self.version = 0

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    def content(self) -> bytes:
        """Returns the last readable content; `version` grows with every change."""
        now_s = self._clock()
        if now_s < self._look_at_s:
            return self._content
        self._look_at_s = now_s + LOOK_S
        try:
            mark = _mark(self._path.stat())
            if mark != self._seen:
                content = self._path.read_bytes()
                self._seen = mark
                if content != self._content:
                    self._content = content
                    self.version += 1
        except OSError as error:
            if not self._is_lost:
                _log.warning(
                    "%s can no longer be read (%s): its last content remains in effect", self._path, error.strerror
                )
            self._is_lost = True
        else:
            self._is_lost = False
        return self._content


def _mark(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ino, status.st_size
