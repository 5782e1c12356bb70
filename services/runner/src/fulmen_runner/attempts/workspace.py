"""The files of one attempt: its working directory, its input, what it writes its rewards to.

Invariant: nothing is made until something asks for it, so that agents that need no files cost none; all that was made
is deleted at the attempt's end, whatever the agent made of it.
"""

import asyncio
import os
import secrets
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import structlog

from fulmen.agent import NotInAttempt

DELETE_DEADLINE_S = 5.0
"""How long an attempt waits for the deletion of its files, which goes on after that."""

_DELETING_THREADS = 2
_PREFIX = "attempt-"
_OWNER_ONLY = 0o700

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where the files of an attempt are; no other user of the machine can read them.

    Attributes:
        root: Holds everything else here; deleted at the end.
        work_dir: The agent's own directory, empty at its start; the grader finds what the agent left there.
        temporary_dir: For temporary files, apart from the working directory.
        task_file: Holds the input.
    """

    root: Path
    work_dir: Path
    temporary_dir: Path
    task_file: Path

    def new_rewards_file(self) -> Path:
        """Makes an empty file for rewards: one for the agent, another for the grader, which the agent never saw."""
        path = self.root / f"rewards-{secrets.token_hex(8)}.jsonl"
        path.touch(mode=0o600, exist_ok=False)
        return path


class Workspace:
    """The files of one attempt, made when they are first asked for."""

    def __init__(self, *, parent: Path | None, content: bytes, threads: ThreadPoolExecutor) -> None:
        self._parent, self._content, self._threads = parent, content, threads
        self._opening: asyncio.Task[Files] | None = None
        self._lock = threading.Lock()
        self._files: Files | None = None
        self._closed = False

    async def open(self) -> Files:
        """Returns the files; makes them once."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self.open_here), name="workspace")
        # Shielded: what is half made could not be deleted.
        return await asyncio.shield(self._opening)

    def open_here(self) -> Files:
        """Returns the files; makes them once. Blocks; in any thread.

        Raises:
            NotInAttempt: If they were deleted already.
        """
        with self._lock:
            if self._closed:
                raise NotInAttempt("The attempt has ended, and its directory is deleted.")
            if self._files is None:
                self._files = _make(self._parent, self._content)
            return self._files

    async def close(self) -> None:
        """Deletes the files; nothing may use them any more. A deletion that takes long goes on in its thread."""
        self._closed = True
        # Whoever takes the lock from here on makes none.
        if self._files is None and not self._lock.locked():
            return
        deleting = asyncio.get_running_loop().run_in_executor(self._threads, self._delete)
        await asyncio.wait((deleting,), timeout=DELETE_DEADLINE_S)

    def _delete(self) -> None:
        with self._lock:
            if self._files is not None:
                _delete(self._files.root)


class Workspaces:
    """Makes the workspaces of a runner; `parent` None is the system's directory for temporary files."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        # Threads of their own: huge trees must not keep the default ones from looking up addresses.
        self._threads = ThreadPoolExecutor(max_workers=_DELETING_THREADS, thread_name_prefix="delete")

    def of(self, content: bytes) -> Workspace:
        """Returns the workspace of an attempt with this input."""
        return Workspace(parent=self._parent, content=content, threads=self._threads)

    def close(self) -> None:
        """Drops deletions that have not begun; the runner deletes the parent itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def delete_tree(root: Path) -> None:
    """Deletes a directory of any depth and size, also one that its owner may not write to. Blocks.

    A subdirectory is moved up to the root before it is emptied, so that neither the depth of calls nor the length of
    paths grows with the tree's. Nobody else may change the tree meanwhile.

    Raises:
        OSError: If something cannot be deleted, such as a file of another user.
    """
    if root.is_symlink():
        root.unlink()
        return
    prefix, numbers = secrets.token_hex(8), count()
    todo = [root]
    while todo:
        directory = todo[-1]
        directory.chmod(_OWNER_ONLY)
        found = _delete_files(directory)
        if not found:
            directory.rmdir()
            todo.pop()
            continue
        if directory == root:
            todo += found
            continue
        todo.pop()
        for path in found:
            path.chmod(_OWNER_ONLY)
            moved = root / f"{prefix}-{next(numbers)}"
            path.rename(moved)
            todo.append(moved)
        directory.rmdir()


def _delete_files(directory: Path) -> list[Path]:
    """Deletes what is no directory, links to directories included, and returns the directories."""
    directories: list[Path] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(Path(entry.path))
            else:
                Path(entry.path).unlink()
    return directories


def _make(parent: Path | None, content: bytes) -> Files:
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    files = Files(root=root, work_dir=root / "work", temporary_dir=root / "tmp", task_file=root / "task")
    files.work_dir.mkdir(mode=_OWNER_ONLY)
    files.temporary_dir.mkdir(mode=_OWNER_ONLY)
    files.task_file.write_bytes(content)
    return files


def _delete(root: Path) -> None:
    try:
        delete_tree(root)
    except FileNotFoundError:
        # The agent was faster.
        return
    except OSError as error:
        _log.warning("attempt_files_not_deleted", path=str(root), error=error.strerror)
