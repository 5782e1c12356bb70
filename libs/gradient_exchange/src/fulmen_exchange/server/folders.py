"""The folders in which sums are kept over a restart: one for each run, with one for each of its shards.

Not for several threads at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path

import structlog

from fulmen_exchange.aggregator.folders import make_folder

ABOUT = "run.json"
NAME_CHARACTERS = 32

_log = structlog.get_logger()
Run = tuple[str, str]
"""Project and name; what different projects exchange never meets."""


class ExchangeFolders:
    """See the module."""

    def __init__(
        self,
        root: Path,
        *,
        keep_s: float,
        is_over: Callable[[Run], bool],
        is_synced: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Takes where they are.

        Args:
            root: Of all of them.
            keep_s: How long the folder of a run stays in which nothing is written.
            is_over: Tells whether a run will never go on.
            is_synced: Whether a crash of the machine, too, must not lose them.
            now: Unix time, in seconds.
        """
        self._root = root
        self._keep_s = keep_s
        self._is_over = is_over
        self._is_synced = is_synced
        self._now = now

    def of(self, run: Run, shard: int) -> Path:
        """Returns the folder of a shard; that of its run is there then."""
        folder = self._root / hashlib.sha256("\0".join(run).encode()).hexdigest()[:NAME_CHARACTERS]
        make_folder(folder, is_synced=self._is_synced)
        about = folder / ABOUT
        if not about.exists():
            about.write_text(json.dumps(run), encoding="utf-8")
        return folder / f"shard-{shard}"

    def sweep(self, served: Container[Run]) -> None:
        """Deletes what no run goes on from: of runs that are over, and what is too old.

        Args:
            served: Runs of which shards are open.
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
