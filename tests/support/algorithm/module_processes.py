"""Finds engines and ranks among the processes that come of this one: children of the algorithm service or of a fork server."""

from __future__ import annotations

import psutil

__all__ = ["ENGINE", "RANK", "processes_of"]

ENGINE = "fulmen_algorithm.engines.embedded"
RANK = "fulmen_algorithm.trainers.rank"


def processes_of(module: str) -> list[psutil.Process]:
    """Returns the processes that run a module, without those that have just ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if module in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found
