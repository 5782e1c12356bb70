"""Reads a range of a file chunk by chunk, also of one that is still being written."""

import os
import threading
from pathlib import Path


class FileReader:
    """A range of a file. Blocks. Thread-safe, as `FileWriter`."""

    def __init__(self, path: Path) -> None:
        """Opens a file, which must not be a link.

        Raises:
            OSError: if there is none.
        """
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._working = threading.Lock()
        self._at = self._end = 0

    @property
    def size_bytes(self) -> int:
        """Size of the file at this moment."""
        return os.fstat(self._descriptor).st_size

    @property
    def is_removed(self) -> bool:
        """Whether the file no longer has a name, so that its missing bytes will not be written."""
        return os.fstat(self._descriptor).st_nlink == 0

    @property
    def left_bytes(self) -> int:
        """What is left of the range."""
        return self._end - self._at

    def go(self, start: int, end: int) -> None:
        """Sets the range; `end` may be beyond the end of a file that is being written."""
        self._at, self._end = start, end

    def next(self, most_bytes: int) -> bytes:
        """Returns the next bytes of the range; none at its end, or where more has not been written yet."""
        with self._working:
            data = os.pread(self._descriptor, min(most_bytes, self.left_bytes), self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Closes the file."""
        with self._working:
            os.close(self._descriptor)
