"""What runs agents outside of the runner: a Docker engine, a Kubernetes cluster.

Invariant: the client of either is imported and connected only where there is such a host, or an agent asks for it; a
runner without pays nothing.
"""

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from fulmen_runner.agents.container.host import ContainerHost
from fulmen_runner.agents.kubernetes.host import JobHost
from fulmen_runner.attempts.errors import HostUnavailable

REAP_INTERVAL_S = 60.0

RUNTIME_LABEL = "runtime"
DOCKER_RUNTIME = "docker"

_log = structlog.get_logger()


class LeavesBehind(Protocol):
    """A host on which dead runners may have left something: an engine, a cluster, a fake one in tests."""

    async def remove_left(self, now_unix_s: float) -> int:
        """Removes what is left behind; returns how much. Raises HostUnavailable."""


class Hosts:
    """The hosts of a runner, made when they are first needed. Background role: removes what dead runners left there."""

    def __init__(
        self, *, make_containers: Callable[[], ContainerHost], make_jobs: Callable[[], Awaitable[JobHost]]
    ) -> None:
        self._make_containers = make_containers
        self._make_jobs = make_jobs
        self._containers: ContainerHost | None = None
        self._jobs: JobHost | None = None
        self._connecting = asyncio.Lock()
        self._connected = asyncio.Event()
        self._complained: set[str] = set()

    async def containers(self) -> ContainerHost:
        """Returns what runs containers.

        Raises:
            HostUnavailable: If its client is not installed, or no engine is named.
        """
        if self._containers is None:
            require("aiodocker", extra="docker", what="containers")
            self._containers = self._make_containers()
            self._connected.set()
        return self._containers

    async def jobs(self) -> JobHost:
        """Returns what runs Jobs.

        Raises:
            HostUnavailable: If its client is not installed, or no cluster is named.
        """
        async with self._connecting:
            if self._jobs is None:
                require("kubernetes_asyncio", extra="kubernetes", what="Jobs")
                self._jobs = await self._make_jobs()
                self._connected.set()
        return self._jobs

    async def has_engine(self) -> bool:
        """Tells whether a Docker engine answers."""
        try:
            await (await self.containers()).engine.check()
        except HostUnavailable as error:
            _log.debug("no_docker_engine", reason=str(error))
            return False
        return True

    async def run(self) -> None:
        """Removes what is left behind, once a host is connected and every minute, until it is cancelled."""
        while True:
            self._connected.clear()
            await self.remove_left()
            try:
                async with asyncio.timeout(REAP_INTERVAL_S):
                    await self._connected.wait()
            except TimeoutError:
                continue

    async def remove_left(self) -> None:
        """Removes what dead runners left behind on the hosts that are used."""
        hosts: dict[str, LeavesBehind | None] = {"docker": self._containers, "kubernetes": self._jobs}
        for name, host in hosts.items():
            if host is None:
                continue
            try:
                count = await host.remove_left(time.time())
            except HostUnavailable as error:
                if name not in self._complained:
                    _log.warning("host_unavailable", host=name, reason=str(error))
                self._complained.add(name)
                continue
            self._complained.discard(name)
            if count:
                _log.info("leftovers_removed", host=name, count=count)

    async def close(self) -> None:
        """Closes the connections."""
        if self._containers is not None:
            await self._containers.engine.close()
        if self._jobs is not None:
            await self._jobs.close()


def require(module: str, *, extra: str, what: str) -> None:
    """Sees to it that an optional package is there.

    Raises:
        HostUnavailable: If it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise HostUnavailable(
            f"This runner cannot run {what}: `pip install fulmen-runner[{extra}]` adds what it needs."
        )
