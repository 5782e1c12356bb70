"""Groups as child processes of this one."""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fulmen_algorithm.clients.forked_child import ModuleProcess, ModuleStarter
from fulmen_algorithm.cluster.placement import planned_together
from fulmen_algorithm.cluster.port import (
    START_DEADLINE_S,
    STOP_GRACE_S,
    ClusterFailed,
    GroupOrder,
    Member,
    Node,
    Resources,
    Welcome,
)
from fulmen_algorithm.cluster.wire import VARIABLE, Ticket, without_settings


class LocalCluster:
    """See `port.Cluster`. The processes never see this process's settings."""

    def __init__(self, modules: ModuleStarter | None = None) -> None:
        """Starts processes as `modules` does; by default fresh ones."""
        self._modules = modules or ModuleStarter(warm=False)

    async def plan(self, *orders: GroupOrder) -> str:
        """See `port.Cluster`. GPUs are counted by the processes themselves, since this one has not loaded torch."""
        return planned_together(orders, [Node(name="this machine", has=own_resources())])

    async def room(self, order: GroupOrder, *, without: Collection[str] = ()) -> int:
        """See `port.Cluster`. This machine has the room that it had before."""
        return order.count

    async def start(self, order: GroupOrder, welcome: Welcome) -> "LocalGroup":
        """See `port.Cluster`."""
        group = LocalGroup()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await group.start(order, self._modules, welcome)
        except BaseException as error:
            await group.end()
            if isinstance(error, OSError | TimeoutError):
                raise ClusterFailed(f"The processes could not be started: {error}") from error
            raise
        return group


class LocalGroup:
    """See `port.ProcessGroup`."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        # Only this user can open the folder and thus the socket.
        self._folder = Path(tempfile.mkdtemp(prefix="fulmen-ranks-"))
        self._processes: list[ModuleProcess] = []
        self._server: asyncio.Server | None = None
        self._stop_grace_s = STOP_GRACE_S
        self._lost: dict[int, bool] = {}

    @property
    def lost(self) -> Mapping[int, bool]:
        """See `port.ProcessGroup`."""
        return self._lost

    @property
    def members(self) -> Sequence[Member]:
        """See `port.ProcessGroup`."""
        node = socket.gethostname()
        return [
            Member(index=index, node=node, address="127.0.0.1", pid=process.pid)
            for index, process in enumerate(self._processes)
        ]

    async def start(self, order: GroupOrder, modules: ModuleStarter, welcome: Welcome) -> None:
        """Starts the processes, whose connections go to `welcome`."""

        async def take(reader: StreamReader, writer: StreamWriter) -> None:
            await welcome(reader, writer)

        self._stop_grace_s = order.stop_grace_s
        self._server = await asyncio.start_unix_server(take, self._folder / "service")
        rendezvous = (self._folder / "rendezvous").absolute().as_uri()
        ticket = Ticket(service=f"unix:{self._folder / 'service'}", rendezvous=rendezvous)
        inherited = without_settings()
        if sys.platform == "linux":
            # Processes on one machine need only the loopback interface.
            inherited |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        for index in range(order.count):
            place = place_variables(index, order.count, local=(index, order.count))
            environment = {**inherited, **order.environment, **place, VARIABLE: ticket.text()}
            started = await modules.start(order.module, list(order.flags), environment=environment, quiet=True)
            self._processes.append(started)

    async def ended(self) -> str:
        """See `port.ProcessGroup`."""
        waits = [asyncio.create_task(each.wait(), name="process-ends") for each in self._processes]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._lost |= {index: False for index, wait in enumerate(waits) if wait.done()}
            index, status = next((index, wait.result()) for index, wait in enumerate(waits) if wait.done())
            return f"process {index} {exit_text(status)}"
        finally:
            for wait in waits:
                wait.cancel()

    async def end(self) -> None:
        """See `port.ProcessGroup`."""
        if self._server is not None:
            self._server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stop_grace_s):
                await asyncio.gather(*(process.wait() for process in self._processes))
        await asyncio.gather(*(process.end(grace_s=self._stop_grace_s) for process in self._processes))
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def own_resources() -> Resources:
    """Returns what this machine has; its GPUs are unknown."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Resources(cpus=os.cpu_count(), gpus=None, memory_bytes=memory)


def place_variables(index: int, count: int, *, local: tuple[int, int]) -> Mapping[str, str]:
    """Returns the variables of a process's place, the same as `torchrun`'s; `local`: its index and count on its node."""
    place = {"RANK": index, "LOCAL_RANK": local[0], "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": local[1]}
    return {name: str(value) for name, value in place.items()}


def exit_text(status: int) -> str:
    """Returns how a process ended; negative for a signal."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
