"""The guardian of one process of a group on another machine: what an engine starts there.

It calls the service that requested the group, reports its address and the folders that it sees, starts the process,
reports its end, and ends it when the service ends, says so, or is silent for too long. The process dies with its
guardian.
"""

import asyncio
import os
import socket
import sys
from asyncio import StreamWriter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fulmen_algorithm.clients.forked_child import ModuleProcess, ModuleStarter
from fulmen_algorithm.cluster.gate import MEMBER
from fulmen_algorithm.cluster.reach import LIMIT_PER_SILENCE, Answering, until_unreached
from fulmen_algorithm.cluster.wire import (
    NODE_VARIABLE,
    PLACE_VARIABLE,
    UNSEEN_VARIABLE,
    VARIABLE,
    Refused,
    Ticket,
    connect,
    read_note,
    unseen_folders,
    without_settings,
    write_note,
)

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
NOT_REACHED = 3
"""Exit status if the service cannot be reached."""
NOT_STARTED = 127
"""Exit status reported for a process that could not be started."""


class Guardian:
    """The guardian, while it is connected."""

    def __init__(self, ticket: Ticket, writer: StreamWriter) -> None:
        self._ticket = ticket
        self._writer = writer
        # One that the guardian was given has torch loaded. A process ends with its guardian either way.
        self._modules = ModuleStarter(warm=True, own=False, tied=True)
        self._child: ModuleProcess | None = None
        self._asked: Answering | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def greet(self) -> None:
        """Reports the address of this process to the service.

        Raises:
            OSError: if other machines cannot ask it.
        """
        node = os.environ.get(NODE_VARIABLE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        address = self._writer.get_extra_info("sockname")[0]
        self._asked = await Answering.at(address)
        devices = os.environ.get(DEVICES_VARIABLE, "")
        self._tell(node=node, address=address, port=self._asked.port, devices=devices, pid=os.getpid())

    async def obey(self, note: Mapping[str, Any]) -> bool:
        """Carries out an order of the service; returns whether to continue."""
        match note.get("do"):
            case "ping":
                self._tell(alive=True)
            case "look":
                self._begin(self._look(note["folders"]))
            case "run":
                # A fork waits for a server that still imports, and pings must be answered.
                self._begin(self._run(note))
                for address, port in note["peers"]:
                    self._begin(self._watch(address, port))
            case "end":
                await self._let_end(note["grace_s"])
                return False
        return True

    async def end(self) -> None:
        """Ends the process."""
        if self._child is not None:
            await self._child.end(grace_s=0)
        if self._asked is not None:
            self._asked.close()
        for task in self._tasks:
            task.cancel()

    async def _run(self, note: Mapping[str, Any]) -> None:
        place = {}
        if UNSEEN_VARIABLE in note["environment"] and PLACE_VARIABLE in os.environ:
            place = {PLACE_VARIABLE: os.environ[PLACE_VARIABLE]}
        environment = {**without_settings(), **place, **note["environment"], VARIABLE: self._ticket.text()}
        try:
            self._child = await self._modules.start(note["module"], note["flags"], environment=environment, quiet=True)
        except OSError as error:
            print(f"{note['module']} cannot be started: {error}", file=sys.stderr)
            self._tell(ended=NOT_STARTED)
            return
        self._tell(started=self._child.pid)
        self._tell(ended=await self._child.wait())

    async def _look(self, folders: Mapping[str, str]) -> None:
        """Reports which folders have different files here than at the service."""
        # In a thread: a shared folder may hang, and pings must be answered.
        self._tell(unseen=await asyncio.to_thread(unseen_folders, folders))

    async def _watch(self, address: str, port: int) -> None:
        """Reports if this machine does not reach another one, which the service may reach."""
        await until_unreached(address, port, limit_s=LIMIT_PER_SILENCE * self._ticket.silence_s)
        self._tell(unreached=address)

    async def _let_end(self, grace_s: float) -> None:
        if self._child is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._child.wait()

    def _tell(self, **note: object) -> None:
        write_note(self._writer, note)

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def guard(ticket: Ticket) -> int:
    """Guards one process; returns the exit status."""
    try:
        reader, writer = await connect(ticket, MEMBER)
    except (OSError, TimeoutError, Refused) as error:
        print(f"The service at {ticket.service} cannot be reached: {error}", file=sys.stderr)
        return NOT_REACHED
    guardian = Guardian(ticket, writer)
    try:
        await guardian.greet()
        while True:
            async with asyncio.timeout(ticket.silence_s):
                note = await read_note(reader)
            if not await guardian.obey(note):
                return 0
    except (OSError, EOFError, TimeoutError, ValueError, KeyError):
        # The service has ended or is cut off, and the process is no longer needed.
        return 0
    finally:
        await guardian.end()
        writer.close()


def main() -> None:
    """Guards a process by the ticket in the environment."""
    sys.exit(asyncio.run(guard(Ticket.from_environment())))


if __name__ == "__main__":
    main()
