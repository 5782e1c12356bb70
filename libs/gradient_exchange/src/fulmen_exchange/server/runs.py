"""The training runs of a server: who may access them, and the folders of their stored sums."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Protocol

import structlog

from fulmen_exchange.aggregator.folders import make_folder

RUN_FILE = "run.json"
NAME_CHARACTERS = 32
Run = tuple[str, str]
"""Project and name of a training run; runs of different projects never meet."""

_log = structlog.get_logger()


class RunAccess(Protocol):
    """Access of the current caller to runs; implemented by the host of the server."""

    def resolve(self, name: str) -> Run:
        """Returns a run that the current caller may access.

        Raises:
            TrainingRunNotFound: if there is no such run, or the caller may not access it.
        """

    def may_access(self, project: str) -> bool:
        """Returns whether the current caller may access the runs of a project."""

    def is_over(self, run: Run) -> bool:
        """Returns whether a run will never resume, so that its stored sums can be deleted."""


class OpenRuns:
    """Lets every caller access every run, for servers inside a trusted network."""

    def resolve(self, name: str) -> Run:
        """See `RunAccess`; all runs are of one project."""
        return "projects/default", name

    def may_access(self, project: str) -> bool:
        """See `RunAccess`."""
        return True

    def is_over(self, run: Run) -> bool:
        """See `RunAccess`; unknown here, so stored sums are deleted by age."""
        return False


class ExchangeFolders:
    """Folders of stored sums: one per run, with one per shard. Not thread-safe."""

    def __init__(
        self,
        root: Path,
        *,
        keep_s: float,
        is_over: Callable[[Run], bool],
        is_synced: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Creates nothing yet.

        Args:
            root: Folder of all runs.
            keep_s: How long the folder of a run is kept after the last write.
            is_over: Returns whether a run will never resume.
            is_synced: Whether files must survive a crash of the machine.
            now: Returns Unix time in seconds.
        """
        self._root = root
        self._keep_s = keep_s
        self._is_over = is_over
        self._is_synced = is_synced
        self._now = now

    def of(self, run: Run, shard: int) -> Path:
        """Returns the folder of a shard, creating that of its run."""
        folder = self._root / hashlib.sha256("\0".join(run).encode()).hexdigest()[:NAME_CHARACTERS]
        make_folder(folder, is_synced=self._is_synced)
        run_file = folder / RUN_FILE
        if not run_file.exists():
            run_file.write_text(json.dumps(run), encoding="utf-8")
        return folder / f"shard-{shard}"

    def sweep(self, served: Container[Run]) -> None:
        """Deletes the folders of runs that are over or too old.

        Args:
            served: Runs with open shards.
        """
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            run = _run_of(folder)
            if run in served or not ((run is not None and self._is_over(run)) or self._is_old(folder)):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            _log.info("stored_sums_deleted", training_run=run[1] if run is not None else "", left=folder.exists())

    def _is_old(self, folder: Path) -> bool:
        newest = max((path.stat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
        return self._now() >= newest + self._keep_s


def _run_of(folder: Path) -> Run | None:
    try:
        project, name = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return str(project), str(name)
