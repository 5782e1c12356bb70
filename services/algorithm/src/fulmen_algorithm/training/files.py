"""Durable files and their checksums."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = "model"
"""Folder of the model in a checkpoint."""
FULL_BELOW_BYTES = 2**20
_TROUBLE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN}
)


class OtherArchitecture(RuntimeError):
    """A checkpoint holds a model or an optimiser of another architecture than the trainer's."""


class StorageFailed(OSError):
    """Storage is full, or an object store failed or could not be reached; the call may succeed later."""


def is_storage_trouble(error: BaseException | None) -> bool:
    """Returns whether an error means that storage is full or unreachable, which is temporary."""
    return isinstance(error, StorageFailed) or (isinstance(error, OSError) and error.errno in _TROUBLE)


def sync(path: Path) -> None:
    """Flushes the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def appear(aside: Path, path: Path) -> None:
    """Renames a folder that is complete; after a power cut it is whole or not there."""
    for written in (*aside.rglob("*"), aside):
        sync(written)
    aside.rename(path)
    sync(path.parent)


def file_sha256(path: Path) -> str:
    """Computes the SHA-256 of a file, in hexadecimal; the file is read in pieces.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def full_disk_as_storage_failed(folder: Path) -> Iterator[None]:
    """Turns errors of libraries that write files into StorageFailed if the disk is full; torch raises RuntimeError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise
        there = next(path for path in (folder, *folder.parents) if path.exists())
        state = os.statvfs(there)
        if state.f_bavail * state.f_frsize < FULL_BELOW_BYTES:
            raise StorageFailed(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
