"""The directory of a runner process, and the cleanup of directories of dead runners.

Invariant: a directory is deleted only by its owner, or when its owner is dead: the kernel releases the lock on it with
the process.
"""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from fulmen_runner.attempts.workspace import ENTERED_BY_ALL
from fulmen_service_kit.isolation.trees import delete_tree

PREFIX = "fulmen-runner-"
LOCK = "lock"

_log = structlog.get_logger()


@contextmanager
def own_directory(parent: Path | None) -> Iterator[Path]:
    """Creates a directory for this process and deletes it on exit; a thread deletes the directories of dead runners
    meanwhile.

    Args:
        parent: Parent directory; None for the system's temporary directory.
    """
    parent = parent or Path(tempfile.gettempdir())
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    # Attempts may have users of their own, which can enter their own folders in it.
    path.chmod(ENTERED_BY_ALL)
    unnamed = path / f".{LOCK}"
    held = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Renamed while it is held, so that it is never visible unlocked.
        unnamed.rename(path / LOCK)
        threading.Thread(target=delete_leftovers, args=(parent,), name="leftovers", daemon=True).start()
        yield path
    finally:
        _delete(path)
        os.close(held)


def delete_leftovers(parent: Path) -> None:
    """Deletes the directories of this user's dead runners. Blocks."""
    try:
        found = [path for path in parent.glob(f"{PREFIX}*") if path.lstat().st_uid == os.getuid()]
    except OSError as error:
        _log.warning("leftovers_not_found", error=str(error))
        return
    for path in found:
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # Being created or deleted, or not a runner's directory.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # The runner is alive.
        else:
            _log.info("leftovers_deleted", path=str(path))
            _delete(path)
        finally:
            os.close(lock)


def _delete(path: Path) -> None:
    try:
        delete_tree(path)
    except OSError as error:
        _log.warning("directory_not_deleted", path=str(path), error=str(error))
