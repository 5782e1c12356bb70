"""Offers this machine to a run for as long as the run lasts, and starts guardians of ranks when the service orders
it.

The guardians and their ranks die with this process. They outlive a stream that breaks: what they are used for is told over
connections of their own.
"""

import asyncio
import os
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL

import structlog

from fulmen.algorithm.v1 import rank_service_pb2 as pb
from fulmen.algorithm.v1.rank_service_pb2_grpc import RankServiceStub
from fulmen_algorithm.clients.child import Child
from fulmen_algorithm.clients.membership import Membership, each
from fulmen_algorithm.cluster.port import STOP_GRACE_S
from fulmen_algorithm.cluster.remote import MODULE
from fulmen_algorithm.cluster.wire import (
    NODE_VARIABLE,
    PLACE_VARIABLE,
    VARIABLE,
    VIEWS,
    Ticket,
    unseen_folders,
    without_settings,
)
from fulmen_service_kit import launch
from fulmen_service_kit.fork_server import CONNECTION_VARIABLE
from fulmen_service_kit.forks import START_LIMIT_S, ForkServer

CHECK_S = 0.1
Say = asyncio.Queue[pb.JoinRanksRequest | None]
_log = structlog.get_logger()


class RankAgent:
    """Background role: one machine of one run."""

    def __init__(
        self,
        *,
        ranks: RankServiceStub,
        hello: pb.RanksHello,
        forks: ForkServer | None,
        ca_file: str,
        place: Path,
        membership: Membership,
    ) -> None:
        """Initializes the role.

        Args:
            ranks: The algorithm service.
            hello: Its description of itself.
            forks: Forks the ranks; None for fresh processes.
            ca_file: PEM file of the service's authorities on this machine; empty for no TLS.
            place: Folder for files of the run that ranks do not see here.
            membership: Joins again, until the run has ended.
        """
        self._ranks = ranks
        self._hello = hello
        self._forks = forks
        self._ca_file = ca_file
        self._place = place
        self._membership = membership
        self._guardians: set[Child] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serves the run until it has ended.

        Raises:
            FulmenError: if the service refuses the machine, or is away for too long.
        """
        try:
            await self._until_warm()
            await self._membership.keep(self._join)
        finally:
            await self._end_guardians()

    async def _until_warm(self) -> None:
        """Waits until ranks can be forked: the service waits for their start, and not for imports."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT_S):
                while self._forks is not None and self._forks.pid is not None and not self._forks.ready:  # noqa: ASYNC110
                    await asyncio.sleep(CHECK_S)

    async def _join(self) -> None:
        """Serves the run for one stream."""
        say: Say = asyncio.Queue()
        say.put_nowait(pb.JoinRanksRequest(hello=self._hello))
        stream, statuses = self._ranks.JoinRanks(each(say)), None
        self._order = 0
        try:
            async for message in stream:
                self._membership.heard()
                match message.WhichOneof("message"):
                    case "look":
                        # In a thread: a shared folder may hang.
                        unseen = await asyncio.to_thread(unseen_folders, dict(message.look.folders))
                        say.put_nowait(pb.JoinRanksRequest(seen=pb.FoldersSeen(unseen=unseen)))
                        interval_s = message.look.status_interval.ToTimedelta().total_seconds()
                        statuses = asyncio.create_task(self._tell_status(say, interval_s), name="rank-status")
                    case "start":
                        await self._end_guardians()
                        self._start(message.start, say)
                    case "end" if message.end.order == self._order:
                        await self._end_guardians()
        finally:
            stream.cancel()
            if statuses is not None:
                statuses.cancel()

    def _start(self, order: pb.StartRanks, say: Say) -> None:
        _log.info("guardians_start", count=order.count)
        self._order = order.order
        tied = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
        ticket = Ticket.from_environment({VARIABLE: order.ticket})
        if ticket.ca_file:
            ticket = replace(ticket, ca_file=self._ca_file)
        # What killed ranks have left; files that no rank uses are removed by the next that fetches any.
        shutil.rmtree(self._place / VIEWS, ignore_errors=True)
        own = {NODE_VARIABLE: self._hello.node, PLACE_VARIABLE: str(self._place.absolute())}
        environment = {**without_settings(), **own, VARIABLE: ticket.text()}
        for _ in range(order.count):
            words = [*tied, sys.executable, "-m", MODULE]
            with ExitStack() as given:
                inherited = {}
                if self._forks is not None:
                    inherited = {CONNECTION_VARIABLE: given.enter_context(self._forks.connection()).fileno()}
                guardian = Child.start(words, environment=environment, output=DEVNULL, inherited=inherited)
            self._guardians.add(guardian)
            watching = asyncio.create_task(self._watch(guardian, order.order, say), name="guardian-ends")
            self._tasks.add(watching)
            watching.add_done_callback(self._tasks.discard)
        self._changed.set()

    async def _watch(self, guardian: Child, order: int, say: Say) -> None:
        status = await guardian.wait()
        self._guardians.discard(guardian)
        say.put_nowait(pb.JoinRanksRequest(ended=pb.RankEnded(order=order, status=status)))
        self._changed.set()

    async def _tell_status(self, say: Say, interval_s: float) -> None:
        """Reports how many guardians run: when that changes, and at least once per interval."""
        while True:
            status = pb.RanksStatus(order=self._order, running=len(self._guardians))
            say.put_nowait(pb.JoinRanksRequest(status=status))
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._changed.wait()

    async def _end_guardians(self) -> None:
        await asyncio.gather(*(guardian.end(grace_s=STOP_GRACE_S) for guardian in list(self._guardians)))
