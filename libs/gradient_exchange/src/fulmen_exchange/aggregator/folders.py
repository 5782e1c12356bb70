"""Creates folders that survive a crash of the machine. No torch is needed."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(folder: Path, *, is_synced: bool) -> None:
    """Creates a folder and its missing parents.

    Args:
        folder: The folder.
        is_synced: Whether it must survive a crash of the machine.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, is_synced=is_synced)
    folder.mkdir(exist_ok=True)
    if is_synced:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flushes the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
