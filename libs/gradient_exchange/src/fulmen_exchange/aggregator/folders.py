"""Folders whose names a crash of the machine does not lose. No torch is needed."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(folder: Path, *, is_synced: bool) -> None:
    """Makes a folder, and those above it, as far as there are none.

    Args:
        folder: Which.
        is_synced: Whether a crash of the machine, too, must not lose them.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, is_synced=is_synced)
    folder.mkdir(exist_ok=True)
    if is_synced:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Has the disk know the names of what is in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
