"""Processes of trainers on this machine: started, asked over a socket, and ended.

Invariant: they never outlive this process (each watches its socket), and never see the service's settings.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fulmen_algorithm.clients.forked_child import ModuleProcess, ModuleStarter
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.calls import ERRORS, LENGTH_BYTES, Answer, Hello, frame_length
from fulmen_exchange.kernels.selection import VARIABLE as KERNELS_VARIABLE

HIDDEN_PREFIX = "FULMEN_"
START_DEADLINE_S = 300.0
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Settings of a group of ranks that depend on the machine.

    Attributes:
        device: `cpu` or `cuda`, without an index, since each rank has its own GPU.
        torch_threads: Threads of one torch operation in one rank.
        call_deadline_s: Timeout of one call, in seconds.
        modules: Starts the ranks' processes; by default fresh ones.
    """

    device: str = "cpu"
    torch_threads: int = 1
    call_deadline_s: float = 3600.0
    modules: ModuleStarter = field(default_factory=lambda: ModuleStarter(warm=False), repr=False)


class RankEnded(Exception):
    """A rank has ended or is unusable."""


class RankRefused(Exception):
    """A rank answered with an error that is passed on to the caller."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of one rank."""

    hello: Hello
    reader: StreamReader
    writer: StreamWriter

    async def ask(self, call: bytes) -> Answer:
        """Sends a call and waits for its answer.

        Raises:
            RankEnded: if the rank ends, or fails unexpectedly.
            RankRefused: if the answer is an error.
        """
        try:
            self.writer.write(call)
            await self.writer.drain()
            answer = msgspec.msgpack.decode(await _read(self.reader), type=Answer)
        except (OSError, EOFError) as error:
            raise RankEnded(f"Rank {self.hello.rank} of the trainer has ended.") from error
        if answer.error in ERRORS:
            raise RankRefused(ERRORS[answer.error](answer.text))
        if answer.error:
            reason = f": {answer.text}" if answer.text else f" ({answer.error}); the log of the service says more"
            raise RankEnded(f"Rank {self.hello.rank} of the trainer failed{reason}.")
        return answer


class Group:
    """The processes of a group, and the folder in which they find the service and each other."""

    def __init__(self) -> None:
        # Only this user can open the folder and thus the socket.
        self.folder = Path(tempfile.mkdtemp(prefix="fulmen-ranks-"))
        self.processes: list[ModuleProcess] = []

    async def end(self, links: Sequence[Link]) -> None:
        """Closes the sockets, waits for the ranks to end, and kills the rest."""
        for link in links:
            link.writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await asyncio.gather(*(process.wait() for process in self.processes))
        await asyncio.gather(*(process.end(grace_s=STOP_GRACE_S) for process in self.processes))
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


async def start_group(module: str, ranks: int, options: GroupOptions) -> tuple[Group, list[Link]]:
    """Starts a module as ranks, and waits for the hello of each.

    Raises:
        TrainerLost: if one ends before that, or they time out.
    """
    links: list[Link] = []
    complete = asyncio.Event()

    async def welcome(reader: StreamReader, writer: StreamWriter) -> None:
        hello = msgspec.msgpack.decode(await _read(reader), type=Hello)
        links.append(Link(hello=hello, reader=reader, writer=writer))
        if len(links) == ranks:
            complete.set()

    group = Group()
    server: asyncio.Server | None = None
    try:
        server = await asyncio.start_unix_server(welcome, group.folder / "service")
        flags = _flags(options, group.folder)
        async with asyncio.timeout(START_DEADLINE_S):
            for rank in range(ranks):
                environment = _environment(options, rank, ranks)
                started = await options.modules.start(module, flags, environment=environment, quiet=True)
                group.processes.append(started)
            await _until_complete(complete, group.processes)
    except BaseException as error:
        await group.end(links)
        if isinstance(error, OSError | TimeoutError | RankEnded):
            raise TrainerLost("The ranks of the trainer did not start; see the log of the service.") from error
        raise
    finally:
        if server is not None:
            server.close()
    return group, links


async def _until_complete(complete: asyncio.Event, processes: Sequence[ModuleProcess]) -> None:
    arriving = asyncio.create_task(complete.wait(), name="ranks-arrive")
    ending = [asyncio.create_task(process.wait(), name="rank-ends") for process in processes]
    try:
        await asyncio.wait({arriving, *ending}, return_when=asyncio.FIRST_COMPLETED)
        if not complete.is_set():
            raise RankEnded("A rank has ended.")
    finally:
        for task in (arriving, *ending):
            task.cancel()


async def _read(reader: StreamReader) -> bytes:
    return await reader.readexactly(frame_length(await reader.readexactly(LENGTH_BYTES)))


def _flags(options: GroupOptions, folder: Path) -> list[str]:
    flags: dict[str, object] = {
        "--socket": folder / "service",
        "--rendezvous": folder / "rendezvous",
        "--device": options.device.partition(":")[0],
        "--threads": options.torch_threads,
        "--deadline-s": options.call_deadline_s,
    }
    return [str(part) for flag in flags.items() for part in flag]


def _environment(options: GroupOptions, rank: int, ranks: int) -> dict[str, str]:
    """Returns the environment of a rank; the variables of its place are those of `torchrun`."""
    inherited = {
        key: value for key, value in os.environ.items() if key == KERNELS_VARIABLE or not key.startswith(HIDDEN_PREFIX)
    }
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    inherited |= {name: str(value) for name, value in place.items()}
    # Modules in the service's working directory must not shadow others.
    inherited |= {"OMP_NUM_THREADS": str(options.torch_threads), "TQDM_DISABLE": "1", "PYTHONSAFEPATH": "1"}
    if sys.platform == "linux":
        # Ranks on one machine need only the loopback interface.
        inherited |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return inherited
