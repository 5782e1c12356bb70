"""The folders of stored sums: one per run, with one per shard. Not thread-safe."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path

import structlog

from fulmen_exchange.aggregator.folders import make_folder
from fulmen_exchange.server.runs import Run

ABOUT = "run.json"
NAME_CHARACTERS = 32

_log = structlog.get_logger()


class ExchangeFolders:
    """The folders of all runs."""

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
        about = folder / ABOUT
        if not about.exists():
            about.write_text(json.dumps(run), encoding="utf-8")
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
            _log.info("kept_sums_deleted", training_run=run[1] if run is not None else "", left=folder.exists())

    def _is_old(self, folder: Path) -> bool:
        newest = max((path.stat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
        return self._now() >= newest + self._keep_s


def _run_of(folder: Path) -> Run | None:
    try:
        project, name = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return str(project), str(name)
