"""The directory of a runner process, and what runners that were killed left of theirs.

Invariant: a directory is deleted only by its owner or once its owner is dead, which its lock tells: the kernel drops the
lock with the process, however it ended.
"""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from fulmen_runner.attempts.workspace import delete_tree

PREFIX = "fulmen-runner-"
LOCK = "lock"

_log = structlog.get_logger()


@contextmanager
def own_directory(parent: Path | None) -> Iterator[Path]:
    """Makes a directory for this process and deletes it in the end; meanwhile a thread deletes those of dead runners.

    Args:
        parent: Where it is made; None is the system's directory for temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    unnamed = path / f".{LOCK}"
    held = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Named when it is held: nobody can find it and not find it locked.
        unnamed.rename(path / LOCK)
        threading.Thread(target=delete_left, args=(parent,), name="leftovers", daemon=True).start()
        yield path
    finally:
        _delete(path)
        os.close(held)


def delete_left(parent: Path) -> None:
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
            continue  # Being made or deleted, or none of ours.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its runner is alive.
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
