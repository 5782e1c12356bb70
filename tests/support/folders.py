"""Folders with short paths."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["short_folder"]

# sun_path holds 104 bytes on macOS and 108 on Linux; pytest's own tmp_path is often longer than that.
SHORT_TEMP_ROOT = "/tmp"


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yields an empty folder whose path leaves room for the name of a Unix socket; removes it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fulmen-", dir=SHORT_TEMP_ROOT))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
