"""Continues to write one file of an upload, and gives it its name once it is complete and its SHA-256 matches."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fulmen.errors import ArgumentInvalid, ModelNotFound, UploadDamaged, UploadOffsetInvalid, Violation
from fulmen.models.files import ModelFile
from fulmen_algorithm.training.files import file_sha256, sync

PART: Final = ".part"
"""Ends the name of a file that is not complete; no file of a model ends with it."""
_TOUCH_S: Final = 30.0


def arrived(place: Path) -> int:
    """Returns how many bytes of a file that is not complete have arrived."""
    try:
        return _part(place).stat().st_size
    except FileNotFoundError:
        return 0


class FileWriter:
    """One file. Blocks. Thread-safe: a stream that ends closes it while its last chunk may still be being written."""

    def __init__(self, place: Path, file: ModelFile, *, touch: Callable[[], None]) -> None:
        """Opens the file.

        Args:
            place: Where it is when it is complete.
            file: Its entry in the manifest.
            touch: Notes that the upload is not idle; called now and then.

        Raises:
            FileNotFoundError: if the upload no longer exists.
        """
        self._place, self._file, self._touch = place, file, touch
        self._touched_s = time.monotonic()
        self._working = threading.Lock()
        self._descriptor = -1
        self.received = file.size_bytes
        if not place.exists():
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(_part(place), flags, 0o600)
            self.received = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Closes the file without flushing it."""
        with self._working:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def write(self, offset: int, data: bytes) -> None:
        """Appends a chunk.

        Raises:
            UploadOffsetInvalid: if it does not begin where the file ends.
            ArgumentInvalid: if it exceeds the size in the manifest.
        """
        with self._working:
            self._append(offset, data)
        if time.monotonic() - self._touched_s > _TOUCH_S:
            self._touch()
            self._touched_s = time.monotonic()

    def _append(self, offset: int, data: bytes) -> None:
        if offset != self.received or self._descriptor < 0:
            raise UploadOffsetInvalid(
                f"The chunk begins at byte {offset} of {self._file.path}, but {self.received} bytes have arrived. "
                "Begin the upload again, and send what is missing.",
                path=self._file.path,
                received_bytes=self.received,
            )
        if offset + len(data) > self._file.size_bytes:
            text = f"{self._file.path} has {self._file.size_bytes} bytes; the chunk ends at {offset + len(data)}"
            raise ArgumentInvalid("The request is malformed.", violations=[Violation(field="data", description=text)])
        left = memoryview(data)
        while left:
            written = os.pwrite(self._descriptor, left, self.received)
            self.received += written
            left = left[written:]

    def finish(self) -> None:
        """Makes durable what was written; a complete file gets its name if it matches the manifest.

        Raises:
            UploadDamaged: if it is not; its bytes are dropped.
            ModelNotFound: if the upload was removed meanwhile.
        """
        part = _part(self._place)
        with self._working:
            if self._descriptor < 0:
                return
            os.fsync(self._descriptor)
            try:
                if self.received == self._file.size_bytes:
                    self._complete(part)
                sync(part.parent)
            except FileNotFoundError:
                if not self._place.exists():
                    raise ModelNotFound("The upload was removed meanwhile: begin it again.") from None
                # Another writer has completed it, and may not have flushed its name yet.
                sync(part.parent)

    def _complete(self, part: Path) -> None:
        if file_sha256(part) != self._file.sha256:
            part.unlink()
            raise UploadDamaged(
                f"{self._file.path} does not have the SHA-256 in the manifest; its received bytes were dropped. "
                "Begin the upload again, and send it again.",
                path=self._file.path,
            )
        part.rename(self._place)


def _part(place: Path) -> Path:
    return place.with_name(f"{place.name}{PART}")
