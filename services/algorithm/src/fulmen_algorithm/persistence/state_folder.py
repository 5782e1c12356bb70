"""The service's state folder: locked by one process at a time, with one folder per run."""

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_service_kit.errors import StartupError


class StateFolder:
    """Holds the folder's lock as a context manager; the kernel releases it when the process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Creates the folder and acquires its lock.

        Raises:
            StartupError: if the folder cannot be created, or another process holds the lock.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = (self._path / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(
                f"Another process works on {self._path}: stop it, or choose another state_dir."
            ) from None
        except OSError as error:
            raise StartupError(f"Cannot use the state folder {self._path}: {error.strerror}.") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def run_files(self, run_id: str) -> RunFiles:
        """Opens the folder of a run."""
        return RunFiles(self._path / "runs" / run_id)

    def runs(self) -> list[tuple[TrainingRun, RunFiles]]:
        """Returns the stored runs; a folder whose run was never saved is skipped."""
        folder = self._path / "runs"
        found = []
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            files = RunFiles(path)
            run = files.load_run()
            if run is not None:
                found.append((run, files))
        return found
