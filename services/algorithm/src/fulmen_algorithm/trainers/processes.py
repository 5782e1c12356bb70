"""Processes of trainers: started on a cluster, asked over connections that they open, and ended.

Invariant: they never outlive this process (each watches its connection), and never see the service's settings.
"""

import asyncio
import os
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from fulmen_algorithm.cluster.gpus.machine import shown_to
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import (
    START_DEADLINE_S,
    Cluster,
    ClusterFailed,
    GroupOrder,
    PlacementRefused,
    ProcessGroup,
    Wishes,
)
from fulmen_algorithm.cluster.wire import read_message
from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.trainers.calls import (
    ERRORS,
    LONGEST_FRAME_BYTES,
    RANKS_LOST,
    Answer,
    Hello,
    Welcome,
    build,
    differences,
    frame,
)
from fulmen_algorithm.trainers.files.server import FileServer
from fulmen_exchange.kernels.selection import VARIABLE as KERNELS_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Settings of a group of ranks that depend on the machine.

    Attributes:
        device: `cpu` or `cuda`, without an index, since each rank has its own GPU.
        torch_threads: Threads of one torch operation in one rank.
        call_deadline_s: Timeout of one call, in seconds.
        gpus: GPUs of this machine that the ranks see, one for each; empty for all.
        cluster: Starts the ranks' processes; by default fresh ones on this machine.
    """

    device: str = "cpu"
    torch_threads: int = 1
    call_deadline_s: float = 3600.0
    gpus: Sequence[int] = ()
    cluster: Cluster = field(default_factory=LocalCluster, repr=False)


class RankEnded(Exception):
    """A rank has ended or is unusable.

    Attributes:
        is_cause: Whether the text is the cause; False if the end of another rank may be the cause.
    """

    is_cause = True


class RankLeft(RankEnded):
    """A rank has left a call, because others are lost; it answers further calls."""

    is_cause = False


class RankBroke(RankEnded):
    """A rank ends over an unknown error, such as that of a collective with one that has ended before."""

    is_cause = False


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
        """Sends a call and waits for its answer. A caller that is cancelled leaves a connection that cannot be used again.

        Raises:
            RankEnded: if the rank ends, or fails unexpectedly.
            RankLeft: if it knows that others are lost.
            RankRefused: if the answer is an error.
        """
        try:
            self.writer.write(call)
            await self.writer.drain()
        except OSError as error:
            raise RankEnded(f"Rank {self.hello.rank} of the trainer has ended.") from error
        return await self.answer()

    async def answer(self) -> Answer:
        """Waits for the next answer; raises as `ask` does."""
        try:
            answer = msgspec.msgpack.decode(await read_message(self.reader, LONGEST_FRAME_BYTES), type=Answer)
        except (OSError, EOFError) as error:
            raise RankEnded(f"Rank {self.hello.rank} of the trainer has ended.") from error
        if answer.error in ERRORS:
            raise RankRefused(ERRORS[answer.error](answer.text))
        if answer.error == RANKS_LOST:
            raise RankLeft(f"Rank {self.hello.rank} of the trainer has lost other ranks.")
        if answer.text and answer.error:
            raise RankEnded(f"Rank {self.hello.rank} of the trainer failed: {answer.text}.")
        if answer.error:
            text = f"Rank {self.hello.rank} of the trainer failed ({answer.error}); see the log of the service."
            raise RankBroke(text)
        return answer


class Group:
    """The processes of a group and their connections, by rank."""

    def __init__(self, processes: ProcessGroup, links: Sequence[Link], files: FileServer) -> None:
        self.processes = processes
        self.files = files
        self.links = sorted(links, key=lambda link: link.hello.rank)

    async def lost(self) -> RankEnded:
        """Waits until a process ends or its machine is silent."""
        return RankEnded(f"The trainer has ended: {await self.processes.ended()}.")

    async def end(self) -> None:
        """Closes the connections, waits for the ranks to end, and kills the rest."""
        self.files.close()
        for link in self.links:
            link.writer.close()
        await self.processes.end()


class _Arrivals:
    """Connections of ranks, until all are connected."""

    def __init__(self, ranks: int) -> None:
        self.links: list[Link] = []
        self.files = FileServer(ranks)
        self.complete = asyncio.Event()
        self._ranks = ranks

    async def welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Takes a connection. The timeout of the start closes connections without a hello."""
        with suppress(OSError, EOFError, ValueError, msgspec.MsgspecError):
            hello = msgspec.msgpack.decode(await read_message(reader), type=Hello)
            if hello.asks_files:
                await self.files.serve(reader, writer)
                return
            self.links.append(Link(hello=hello, reader=reader, writer=writer))
            if len(self.links) == self._ranks:
                self.complete.set()


async def start_group(module: str, ranks: int, options: GroupOptions, wishes: Wishes | None = None) -> Group:
    """Starts a module as ranks, and waits for the hello of each.

    Raises:
        TrainerLost: if one ends before that, or they time out.
        RunFailed: if the group does not fit the cluster, or machines differ in what results depend on.
    """
    order = group_order(module, ranks, options, wishes or Wishes())
    arrivals = _Arrivals(ranks)
    try:
        processes = await options.cluster.start(order, arrivals.welcome)
    except ClusterFailed as error:
        raise TrainerLost(f"The ranks of the trainer did not start: {error}") from error
    except PlacementRefused as error:
        raise RunFailed(f"The ranks of the trainer cannot run there: {error}.") from error
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            await _until_complete(arrivals.complete, processes)
        await asyncio.to_thread(_check_builds, arrivals.links)
    except BaseException as error:
        await Group(processes, arrivals.links, arrivals.files).end()
        if isinstance(error, OSError | TimeoutError | RankEnded):
            raise TrainerLost("The ranks of the trainer did not start; see the log of the service.") from error
        raise
    group = Group(processes, arrivals.links, arrivals.files)
    # Ranks of one machine meet at the address in their ticket, others at the first of them.
    welcome = frame(msgspec.msgpack.encode(Welcome(rendezvous=group.links[0].hello.meeting)))
    for link in group.links:
        link.writer.write(welcome)
    return group


def group_order(module: str, ranks: int, options: GroupOptions, wishes: Wishes) -> GroupOrder:
    """Returns the order to a cluster."""
    flags: dict[str, object] = {
        "--device": options.device.partition(":")[0],
        "--threads": options.torch_threads,
        "--deadline-s": options.call_deadline_s,
    }
    # Modules in the working directory must not shadow others.
    environment = {"OMP_NUM_THREADS": str(options.torch_threads), "TQDM_DISABLE": "1", "PYTHONSAFEPATH": "1"}
    # All ranks see all of these, as torchrun's do, and each takes that of its LOCAL_RANK.
    environment |= shown_to(options.gpus)
    if KERNELS_VARIABLE in os.environ:
        environment[KERNELS_VARIABLE] = os.environ[KERNELS_VARIABLE]
    return GroupOrder(
        module=module,
        flags=[str(part) for flag in flags.items() for part in flag],
        environment=environment,
        count=ranks,
        wishes=wishes,
    )


def _check_builds(links: Sequence[Link]) -> None:
    """Checks that all ranks have what this process has, as far as results depend on it.

    Raises:
        RunFailed: with every difference.
    """
    told = [link.hello for link in links if link.hello.build]
    if not told:
        return
    mine = build()
    found = [
        f"rank {hello.rank} {text}"
        for hello in sorted(told, key=lambda each: each.rank)
        for text in differences(hello.build, mine)
    ]
    if found:
        raise RunFailed(f"The machines of the ranks differ: {'; '.join(found)}.")


async def _until_complete(complete: asyncio.Event, processes: ProcessGroup) -> None:
    arriving = asyncio.create_task(complete.wait(), name="ranks-arrive")
    ending = asyncio.create_task(processes.ended(), name="rank-ends")
    try:
        await asyncio.wait({arriving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not complete.is_set():
            raise RankEnded("A rank has ended.")
    finally:
        for task in (arriving, ending):
            task.cancel()
