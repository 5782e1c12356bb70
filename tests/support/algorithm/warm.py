"""Ranks, engines and services as forks of a process that has torch loaded, one for all tests of a worker.

A fresh process spends three seconds of CPU on imports, and a fork server of each service's own six.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fulmen_algorithm.clients.forked_child import PRELOADED, ModuleStarter
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_service_kit.fork_server import CONNECTION_VARIABLE
from fulmen_service_kit.forks import ForkServer
from tests.support import forked
from tests.support.machines import at_home

__all__ = ["fork_server", "given_forks", "given_forks_here", "here", "warm_modules"]

_servers: list[ForkServer] = []


def fork_server() -> ForkServer:
    """Returns the process that is forked, started again if a test has ended it. Main thread only: it ends with its thread."""
    if not _servers or _servers[-1].pid is None:
        made = ForkServer([PRELOADED])
        # A fork looks for modules where the process looks that it is a fork of: the tests' own are among them.
        path = os.pathsep.join(filter(None, sys.path))
        # Otherwise it is as the tests began, not as the one that comes first has changed it.
        environment = {**(forked.ENVIRONMENT or os.environ), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with at_home(), mock.patch.dict(os.environ, environment, clear=True):
            made.start()
        atexit.register(made.close)
        _servers.append(made)
    return _servers[-1]


@contextmanager
def given_forks() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Yields the variable and the descriptor that a service is started with, so that it forks what others fork, too."""
    with fork_server().connection() as connection:
        yield {CONNECTION_VARIABLE: str(connection.fileno())}, (connection.fileno(),)


@contextmanager
def given_forks_here() -> Iterator[None]:
    """Has a service that is built in this process take what `given_forks` gives one of its own process."""
    with mock.patch.dict(os.environ, {CONNECTION_VARIABLE: str(fork_server().connection().detach())}):
        yield


def warm_modules() -> ModuleStarter:
    """Returns what starts modules as forks, also those of the tests. It need not be closed."""
    made = ModuleStarter(warm=True, own=False)
    made._servers = [fork_server()]
    return made


def here() -> LocalCluster:
    """Returns this machine, to start ranks on."""
    return LocalCluster(warm_modules())
