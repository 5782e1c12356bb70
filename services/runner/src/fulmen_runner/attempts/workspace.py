"""The files of one attempt: working directory, input and rewards files.

Invariant: files are created on first use, so that agents without files cost none, and are deleted when the attempt
ends, whatever the agent did to them.
"""

import asyncio
import secrets
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from fulmen.agent import NotInAttempt
from fulmen_service_kit.isolation.trees import delete_tree

DELETE_TIMEOUT_S = 5.0
"""How long an attempt waits for the deletion of its files, which continues in the background."""

_DELETING_THREADS = 2
_PREFIX = "attempt-"
_OWNER_ONLY = 0o700
ENTERED_BY_ALL = 0o711
"""Mode of a folder with the folders of several attempts, which may have users of their own."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Paths of an attempt's files, which only the runner's user can read.

    Attributes:
        root: Parent of the others; deleted when the attempt ends.
        work_dir: Working directory, shared by agent and grader; empty at the start.
        temporary_dir: Directory for temporary files.
        task_file: File with the input.
        progress_file: File in which the agent reports its progress; it does not exist before.
    """

    root: Path
    work_dir: Path
    temporary_dir: Path
    task_file: Path
    progress_file: Path

    def new_rewards_file(self) -> Path:
        """Creates an empty rewards file. Agent and grader get one each, so the agent cannot know the grader's."""
        path = self.root / f"rewards-{secrets.token_hex(8)}.jsonl"
        path.touch(mode=0o600, exist_ok=False)
        return path


class Workspace:
    """The files of one attempt, created on first use."""

    def __init__(self, *, parent: Path | None, content: bytes, threads: ThreadPoolExecutor) -> None:
        self._parent, self._content, self._threads = parent, content, threads
        self._opening: asyncio.Task[Files] | None = None
        self._lock = threading.Lock()
        self._files: Files | None = None
        self._closed = False

    async def open(self) -> Files:
        """Returns the files; creates them on the first call."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self.open_here), name="workspace")
        # Shielded: half-created files could not be deleted.
        return await asyncio.shield(self._opening)

    @property
    def opened(self) -> Files | None:
        """The files; None if they were not created."""
        return self._files

    def open_here(self) -> Files:
        """Like `open`, for any thread. Blocks.

        Raises:
            NotInAttempt: If the files are already deleted.
        """
        with self._lock:
            if self._closed:
                raise NotInAttempt("attempt has ended; its working directory is deleted")
            if self._files is None:
                self._files = _make(self._parent, self._content)
            return self._files

    async def close(self) -> None:
        """Deletes the files, waiting for up to `DELETE_TIMEOUT_S`. Nothing may use them any more."""
        self._closed = True
        # `open_here` creates nothing from here on.
        if self._files is None and not self._lock.locked():
            return
        deleting = asyncio.get_running_loop().run_in_executor(self._threads, self._delete)
        await asyncio.wait((deleting,), timeout=DELETE_TIMEOUT_S)

    def _delete(self) -> None:
        with self._lock:
            if self._files is not None:
                _delete(self._files.root)


class Workspaces:
    """Creates the workspaces of a runner below `parent`; None for the system's temporary directory."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        # Own threads: deleting huge trees must not delay the default executor's DNS lookups.
        self._threads = ThreadPoolExecutor(max_workers=_DELETING_THREADS, thread_name_prefix="delete")

    def of(self, content: bytes, parent: Path | None = None) -> Workspace:
        """Returns the workspace of an attempt.

        Args:
            content: Its input.
            parent: Folder for its files, created if missing; None for the folder of all attempts.
        """
        return Workspace(parent=parent or self._parent, content=content, threads=self._threads)

    def close(self) -> None:
        """Cancels deletions that have not started; the runner deletes the parent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _make(parent: Path | None, content: bytes) -> Files:
    if parent is not None:
        parent.mkdir(mode=ENTERED_BY_ALL, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    files = Files(
        root=root,
        work_dir=root / "work",
        temporary_dir=root / "tmp",
        task_file=root / "task",
        progress_file=root / "progress.json",
    )
    files.work_dir.mkdir(mode=_OWNER_ONLY)
    files.temporary_dir.mkdir(mode=_OWNER_ONLY)
    files.task_file.write_bytes(content)
    return files


def _delete(root: Path) -> None:
    try:
        delete_tree(root)
    except FileNotFoundError:
        # The agent deleted it.
        return
    except OSError as error:
        _log.warning("attempt_files_not_deleted", path=str(root), error=error.strerror)
