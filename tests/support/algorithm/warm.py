"""Ranks on this machine as forks of a process that has torch loaded, one for all tests of a worker: a fresh rank costs seconds of CPU."""

from __future__ import annotations

import atexit
import functools

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.cluster.local import LocalCluster

__all__ = ["here", "warm_modules"]


@functools.cache
def warm_modules() -> ModuleStarter:
    """Returns what starts modules as forks; it ends with this process."""
    made = ModuleStarter(warm=True)
    atexit.register(made.close)
    return made


def here() -> LocalCluster:
    """Returns this machine, to start ranks on."""
    return LocalCluster(warm_modules())
