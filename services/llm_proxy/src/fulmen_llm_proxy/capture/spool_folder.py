"""The spool's folders: one per process.

Each process has its own folder below `spool_dir`, and holds an exclusive lock on the file `<folder>.lock` beside it
while it runs. A folder whose lock is free belongs to a process that has ended: the first process to get the lock moves
its files to its own folder, where they are read before anything newer.

Invariant: a folder exists only while its lock file does, and is only touched by the holder of the lock.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.spool import SUFFIX, DiskSpool, sync_folder
from fulmen_llm_proxy.metrics.captures import CaptureMetrics
from fulmen_service_kit.errors import StartupError

_LOCK_SUFFIX = ".lock"
_FOLDER_MODE = 0o700
_DISK_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class SpoolFolder:
    """A folder owned by this process until `close`."""

    path: Path
    adopted: int
    _lock_fd: int

    def close(self) -> None:
        """Releases the folder; removes it if it is empty."""
        try:
            if not any(self.path.iterdir()):
                _remove(self.path)
        finally:
            os.close(self._lock_fd)


def open_folder(root: Path, instance_id: str) -> SpoolFolder:
    """Creates this process's folder, and adopts the files of processes that have ended.

    Raises:
        OSError: if the disk fails, or the folder is not writable.
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
    """Moves the files of an ended process; returns their number, 0 if the process is running."""
    lock_fd = _lock(orphan)
    if lock_fd is None:
        return 0
    try:
        if not orphan.is_dir():
            _remove(orphan)  # another process was faster; only the lock file created by this call is left
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
    """Locks a folder; returns None if a running process holds the lock."""
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


async def open_spool(
    root: Path,
    instance_id: str,
    *,
    max_bytes: int,
    ledger: AttemptLedger,
    metrics: CaptureMetrics,
    stack: AsyncExitStack,
) -> DiskSpool | None:
    """Opens this process's spool with the files of ended processes, and adds their calls to the ledger.

    Returns None if the disk is full or fails: serving calls has priority.

    Args:
        max_bytes: maximum size of the spool, bytes.
        stack: closes the spool.

    Raises:
        StartupError: if the folder is not a folder, or belongs to another user.
    """
    try:
        folder, spool = await asyncio.to_thread(_open, root, instance_id, max_bytes)
    except OSError as error:
        if error.errno in _DISK_FAILURES:
            _log.error("spool_disk_failed", errno=error.errno, error=error.strerror)
            metrics.disk_failed()
            return None
        raise StartupError(f"Cannot use the folder spool_dir={root}: {error.strerror}.") from None
    stack.callback(_close, folder, spool)
    for attempt, calls in spool.waiting().items():
        ledger.adopt(attempt, calls=calls)
    for loss in spool.drain_losses():
        _log.error("captures_lost", reason=loss.reason, records=loss.calls)
        metrics.dropped(loss.reason, loss.calls)
    metrics.spool_bytes.set_function(lambda: spool.size_bytes)
    metrics.spool_records.set_function(lambda: spool.records)
    _log.info("spool_opened", adopted_files=folder.adopted, records=spool.records, size_bytes=spool.size_bytes)
    return spool


def _open(root: Path, instance_id: str, max_bytes: int) -> tuple[SpoolFolder, DiskSpool]:
    folder = open_folder(root, instance_id)
    try:
        return folder, DiskSpool(folder.path, max_bytes=max_bytes)
    except OSError:
        folder.close()
        raise


def _close(folder: SpoolFolder, spool: DiskSpool) -> None:
    try:
        spool.close()
    except OSError as error:
        _log.error("spool_disk_failed", errno=error.errno, error=error.strerror)
    finally:
        folder.close()
