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
from fulmen_exchange.aggregator.held_folder import HeldFolder

RUN_FILE = "run.json"
NAME_CHARACTERS = 32
_log = structlog.get_logger()


class RunAccess(Protocol):
    """Access of the current caller to runs; implemented by the host of the server."""

    def require(self, run: str) -> None:
        """Checks that the current caller may access a run.

        Raises:
            TrainingRunNotFound: if it may not, or the name is malformed.
        """

    def is_over(self, run: str) -> bool:
        """Returns whether a run will never resume, so that its stored sums can be deleted."""


class OpenRuns:
    """Lets every caller access every run, for servers inside a trusted network."""

    def require(self, run: str) -> None:
        """See `RunAccess`."""

    def is_over(self, run: str) -> bool:
        """See `RunAccess`; unknown here, so stored sums are deleted by age."""
        return False


class ExchangeFolders:
    """Folders of stored sums: one per run, with one per shard. Not thread-safe."""

    def __init__(
        self,
        root: Path,
        *,
        keep_s: float,
        is_over: Callable[[str], bool],
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

    def hold(self, run: str, shard: int) -> HeldFolder:
        """Takes the folder of a shard, creating it and that of its run if there is none.

        Raises:
            FolderHeld: if another server holds it.
        """
        folder = self._root / hashlib.sha256(run.encode()).hexdigest()[:NAME_CHARACTERS]
        make_folder(folder, is_synced=self._is_synced)
        run_file = folder / RUN_FILE
        if not run_file.exists():
            run_file.write_text(json.dumps(run), encoding="utf-8")
        return HeldFolder(folder, f"shard-{shard}", is_synced=self._is_synced)

    def sweep(self, served: Container[str]) -> None:
        """Deletes the folders of runs that are over or too old.

        Args:
            served: Runs with open shards.
        """
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            run = _run_of(folder)
            if run in served or not ((run is not None and self._is_over(run)) or self._is_old(folder)):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            _log.info("stored_sums_deleted", training_run=run or "", left=folder.exists())

    def _is_old(self, folder: Path) -> bool:
        newest = max((path.stat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
        return self._now() >= newest + self._keep_s


def _run_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
