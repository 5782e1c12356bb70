"""Finds the engines among the processes that come of this one: children of the algorithm service or of its fork server."""

from __future__ import annotations

import psutil

__all__ = ["engine_processes"]

MODULE = "fulmen_algorithm.engines.embedded"


def engine_processes() -> list[psutil.Process]:
    """Returns the running embedded engines, without those that have just ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if MODULE in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found
