"""Where the service keeps its state and its runs.

The state folder belongs to one process. The runs are in it, a folder per project, or in a folder or object store
that several services share;
their leases at the store decide which service writes.
"""

import fcntl
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import unquote, urlsplit

import structlog

from fulmen.ids import uuid7
from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.persistence.object_mirror import ObjectMirror
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_service_kit.errors import StartupError

_log = structlog.get_logger()


class RunStorage:
    """The service's state folder, and the folder or object store of the runs.

    As a context manager it holds a lock on the state folder; the kernel releases it when the process dies.
    """

    def __init__(self, state: Path, *, url: str = "") -> None:
        """`url` is a folder, `file:///folder`, or `s3://bucket/prefix`, `gs://` or `az://`; empty for the state folder."""
        self._state = state.resolve()
        self._lock: IO[bytes] | None = None
        self.mirror: ObjectMirror | None = None
        self.folder = self._state / "runs"
        if url.startswith("file://"):
            self.folder = Path(unquote(urlsplit(url).path)) / "runs"
        elif "://" in url:
            self.mirror = ObjectMirror.open(url)
        elif url:
            self.folder = Path(url).expanduser().resolve() / "runs"
        self.owner = ""
        self.storage_id = hashlib.sha256(url.rstrip("/").encode()).hexdigest() if self.mirror is not None else ""

    def __enter__(self) -> Self:
        """Creates the state folder and acquires its lock.

        Raises:
            StartupError: if the folder cannot be created, or another process holds the lock.
        """
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            self._lock = (self._state / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.owner = _owner(self._state / "owner")
        except BlockingIOError:
            raise StartupError(f"Another process uses {self._state}: stop it, or choose another state_dir.") from None
        except OSError as error:
            raise StartupError(f"Cannot use the state folder {self._state}: {error.strerror}.") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.storage_id = self.storage_id or _storage_id(self.folder.parent / "storage-id")
        except OSError as error:
            raise StartupError(f"Cannot use the folder of runs {self.folder}: {error.strerror}.") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def run_files(self, run: TrainingRun, *, epoch: int | None = None) -> RunFiles:
        """Opens the folder of a run: its newest journal, or that of an epoch."""
        return RunFiles(self.folder / run.folder, epoch=epoch, mirror=self.mirror)

    async def newest_files(self, run: TrainingRun) -> RunFiles:
        """Opens the newest journal of a run that another service has run.

        Raises:
            OSError: if the storage cannot be reached.
        """
        if self.mirror is not None:
            await self.mirror.pull_journal(self.folder / run.folder)
        return self.run_files(run)

    def runs(self) -> list[tuple[TrainingRun, RunFiles]]:
        """Returns the stored runs; a folder whose run was never saved, or cannot be read, is skipped."""
        found = []
        for path in sorted(self.folder.glob("*/*/")):
            try:
                files = RunFiles(path, mirror=self.mirror)
                run = files.load_run()
            except ValueError as error:
                # It stays as it is, for a person to repair; the others go on.
                _log.error("run_files_damaged", folder=str(path), error=type(error).__name__)
                continue
            if run is not None:
                found.append((run, files))
        return found


def _storage_id(path: Path) -> str:
    """Reads the id of a folder of runs, which all services that mount it share; the first one chooses it."""
    if not path.exists():
        aside = path.with_name(f".{path.name}-{uuid7()}")
        replace_file(aside, str(uuid7()).encode())
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return path.read_text()


def _owner(path: Path) -> str:
    """Reads the id by which leases name this service; kept across restarts, so that it reclaims its own runs
    immediately."""
    if not path.exists() or not path.read_text():
        replace_file(path, str(uuid7()).encode())
    return path.read_text()
