"""Durable files and their checksums."""

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Computes the SHA-256 of a file, in hexadecimal; the file is read in pieces.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
