"""Which folder of the spool belongs to which process.

Each process has a folder of its own below `spool_dir`, and holds an exclusive lock on the file
`<folder>.lock` beside it for as long as it lives. A folder whose lock can be had is that of a
process that is gone: whoever gets the lock first moves its files to its own folder, where they are
read before all that is newer.

Invariant: a folder exists only while its lock file does, and is only touched by who holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fulmen_llm_proxy.capture.spool import SUFFIX, sync_folder

_LOCK_SUFFIX = ".lock"
_FOLDER_MODE = 0o700


@dataclass(slots=True)
class SpoolFolder:
    """A folder that this process owns until `close`."""

    path: Path
    adopted: int
    _lock_fd: int

    def close(self) -> None:
        """Gives the folder up; removes it if nothing is left in it."""
        try:
            if not any(self.path.iterdir()):
                _remove(self.path)
        finally:
            os.close(self._lock_fd)


def open_folder(root: Path, instance_id: str) -> SpoolFolder:
    """Makes this process's folder and takes over those of processes that are gone.

    Raises:
        OSError: if the disk fails, or the folder may not be written.
    """
    root.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
    path = root / instance_id
    lock_fd = _lock(path)
    if lock_fd is None:
        raise FileExistsError(f"{path} is in use")
    path.mkdir(mode=_FOLDER_MODE)
    adopted = sum(_adopt(other, path) for other in sorted(root.iterdir()) if other.is_dir() and other != path)
    sync_folder(path)
    return SpoolFolder(path, adopted, lock_fd)


def _adopt(orphan: Path, own: Path) -> int:
    """Moves the files of a process that is gone; returns how many, 0 if it lives."""
    lock_fd = _lock(orphan)
    if lock_fd is None:
        return 0
    try:
        if not orphan.is_dir():
            _remove(orphan)  # another process was faster: only the lock file is left, which was made just now
            return 0
        moved = 0
        for file in sorted(orphan.glob(f"*{SUFFIX}")):
            file.rename(own / file.name)
            moved += 1
        if not any(orphan.iterdir()):
            _remove(orphan)
        return moved
    finally:
        os.close(lock_fd)


def _lock(folder: Path) -> int | None:
    """Takes the lock of a folder; None if a living process has it."""
    fd = os.open(folder.with_name(folder.name + _LOCK_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(folder.name + _LOCK_SUFFIX).unlink(missing_ok=True)
