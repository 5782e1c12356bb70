"""Groups on other machines: an engine starts a guardian for each process (`member`), and the guardians call back here.

What is known of the processes comes over these connections, alike for all engines: where they are, that they live, how they
ended. A machine that accepts and never answers is silent, and counts as dead; of machines that do not reach each other, some are left out.
"""

import asyncio
import json
import secrets
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

import structlog

from fulmen_algorithm.cluster.gate import MEMBER, PROCESS, Gate
from fulmen_algorithm.cluster.local import exit_text, place_variables
from fulmen_algorithm.cluster.partings import LeftOut, left_out
from fulmen_algorithm.cluster.placement import planned_together, room_of
from fulmen_algorithm.cluster.port import (
    ClusterFailed,
    GroupOrder,
    Member,
    Node,
    PlacementRefused,
    Welcome,
)
from fulmen_algorithm.cluster.reach import LIMIT_PER_SILENCE
from fulmen_algorithm.cluster.wire import UNSEEN_VARIABLE, Ticket, folder_digest, read_note, write_note

MODULE = "fulmen_algorithm.cluster.member"
"""What an engine starts for each process, with the group's ticket in its environment."""
PINGS_PER_SILENCE = 4
DECISIONS_PER_SILENCE = 2
"""Time from the first machine that misses another to the decision who is left out; others may miss some, too."""
LOOK_DEADLINE_S = 60.0
CANCEL_DEADLINE_S = 60.0
LONGEST_QUEUE_BYTES = 2**16
"""Pings to a machine that does not read are left out above this."""
Answer = TypeVar("Answer")
_log = structlog.get_logger()


class Launch(Protocol):
    """Guardians that an engine starts, and its reports about them."""

    async def failed(self) -> str:
        """Waits until the engine reports that they cannot run, or have ended; returns the reason."""

    async def cancel(self) -> None:
        """Has the engine end them; idempotent."""


class Launcher(Protocol):
    """An engine that starts guardians."""

    async def nodes(self) -> Sequence[Node]:
        """Returns the nodes that a group may use; none if the engine does not report them.

        Raises:
            ClusterFailed: if it does not answer.
        """

    def together(self, order: GroupOrder) -> int:
        """Returns how many processes of a group it places as one."""

    async def launch(self, order: GroupOrder, ticket: Ticket) -> Launch:
        """Has the engine start `python -m` `MODULE` once for each process, with the ticket.

        Raises:
            ClusterFailed: if it refuses or does not answer.
        """


class RemoteCluster:
    """See `port.Cluster`."""

    def __init__(
        self,
        launcher: Launcher,
        gate: Gate,
        *,
        start_deadline_s: float,
        left_out: LeftOut | None = None,
        shares_folders: bool = True,
    ) -> None:
        """Starts nothing yet.

        Args:
            launcher: The engine.
            gate: The port at which guardians call.
            start_deadline_s: Timeout of a start, with the time in the engine's queue.
            left_out: Nodes that were left out of groups; by default those of this cluster.
            shares_folders: Whether a process that does not see a folder is refused. Otherwise it is informed, and requests the
                files.
        """
        self._launcher = launcher
        self._gate = gate
        self._start_deadline_s = start_deadline_s
        self._left_out = left_out or LeftOut()
        self._shares_folders = shares_folders

    async def plan(self, *orders: GroupOrder) -> str:
        """See `port.Cluster`."""
        nodes = await self._launcher.nodes()
        if not nodes:
            return f"{sum(order.count for order in orders)} processes, on nodes that the cluster chooses (it does not report its nodes)"
        return planned_together([self._as_placed(order) for order in orders], nodes)

    async def room(self, order: GroupOrder, *, without: Collection[str] = ()) -> int:
        """See `port.Cluster`."""
        nodes = await self._nodes()
        if nodes is None:
            return order.count
        return room_of(self._as_placed(order), nodes, without={*without, *self._left_out.names})

    async def start(self, order: GroupOrder, welcome: Welcome) -> "RemoteGroup":
        """See `port.Cluster`."""
        group = RemoteGroup(await self._on_others(order), self._gate, self._left_out.add)
        try:
            async with asyncio.timeout(self._start_deadline_s):
                await group.gather(self._launcher, welcome)
            await group.check_folders(refuse=self._shares_folders)
            await group.run()
        except BaseException as error:
            await group.end()
            if isinstance(error, TimeoutError):
                text = f"{group.arrived} of {order.count} processes have started within {self._start_deadline_s:g} s."
                raise ClusterFailed(text) from error
            if isinstance(error, OSError):
                raise ClusterFailed(f"The port for other machines cannot be opened: {error}") from error
            raise
        return group

    async def _nodes(self) -> Sequence[Node] | None:
        """Returns the nodes whose free resources count; None if the engine does not report them."""
        return await self._launcher.nodes() or None

    def _as_placed(self, order: GroupOrder) -> GroupOrder:
        """Returns an order with what is placed as one."""
        return replace(order, wishes=replace(order.wishes, together=self._launcher.together(order)))

    async def _on_others(self, order: GroupOrder) -> GroupOrder:
        """Returns an order on other nodes than those that were left out of groups, if these have room for it."""
        names = self._left_out.names
        if not names or await self.room(order) < order.count:
            return order
        return replace(order, wishes=replace(order.wishes, without=names))


class _Guard:
    """The connection of one guardian."""

    def __init__(
        self, reader: StreamReader, writer: StreamWriter, ticket: Ticket, parted: "Callable[[_Guard, str], None]"
    ) -> None:
        """`parted` is called with the addresses of machines that this one does not reach."""
        self.reader, self.writer, self._silence_s, self._parted = reader, writer, ticket.silence_s, parted
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.unseen: asyncio.Future[list[str]] = loop.create_future()
        self.started: asyncio.Future[int] = loop.create_future()
        self.node = self.address = self.devices = ""
        self.port = 0
        self.not_seen: list[str] = []
        self.process_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def place(self) -> tuple[str, str, str]:
        """Node, address and devices; processes that share them are numbered on their node."""
        return self.node, self.address, self.devices

    async def greet(self) -> None:
        """Reads who it is, and watches it from then on."""
        hello = await read_note(self.reader)
        self.node, self.address, self.devices = (str(hello[key]) for key in ("node", "address", "devices"))
        self.port = int(hello["port"])
        self._tasks = [
            asyncio.create_task(self._listen(), name=f"guard-{self.node}"),
            asyncio.create_task(self._ping(), name=f"ping-{self.node}"),
        ]

    def tell(self, do: str, **note: object) -> None:
        """Sends an order to the guardian."""
        if not self.writer.is_closing():
            write_note(self.writer, {"do": do, **note})

    def close(self) -> None:
        """Breaks the connection off; the guardian then ends its process."""
        for task in self._tasks:
            task.cancel()
        self.lose(f"the process on {self.node} was ended")
        self.writer.transport.abort()

    async def _listen(self) -> None:
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    note = await read_note(self.reader)
                if "unseen" in note and not self.unseen.done():
                    self.unseen.set_result([str(folder) for folder in note["unseen"]])
                if "started" in note and not self.started.done():
                    self.started.set_result(int(note["started"]))
                if "unreached" in note:
                    self._parted(self, str(note["unreached"]))
                if "ended" in note:
                    self.process_ended = True
                    self.lose(f"the process on {self.node} ({self.address}) {exit_text(int(note['ended']))}")
        except TimeoutError:
            self.lose(f"{self.node} ({self.address}) sent nothing for {self._silence_s:g} s")
        except (OSError, EOFError, ValueError, TypeError):
            self.lose(f"the process on {self.node} ({self.address}) has ended with its guardian")

    async def _ping(self) -> None:
        while not self.writer.is_closing():
            if self.writer.transport.get_write_buffer_size() < LONGEST_QUEUE_BYTES:
                self.tell("ping")
            await asyncio.sleep(self._silence_s / PINGS_PER_SILENCE)

    def lose(self, text: str) -> None:
        """Counts the process as lost; the message has the reason."""
        if not self.lost.done():
            self.lost.set_result(text)


class RemoteGroup:
    """See `port.ProcessGroup`."""

    def __init__(self, order: GroupOrder, gate: Gate, leave_out: Callable[[str], None]) -> None:
        """Starts nothing yet; `leave_out` is called with the names of nodes that are left out of the group."""
        self._order = order
        self._gate = gate
        self._leave_out = leave_out
        self._partings: set[frozenset[str]] = set()
        self._deciding: asyncio.Task[None] | None = None
        self._ticket: Ticket | None = None
        self._launch: Launch | None = None
        self._guards: list[_Guard] = []
        self._complete = asyncio.Event()

    @property
    def arrived(self) -> int:
        """Number of guardians that have called."""
        return len(self._guards)

    @property
    def members(self) -> Sequence[Member]:
        """See `port.ProcessGroup`."""
        return [
            Member(index=index, node=guard.node, address=guard.address, pid=guard.started.result())
            for index, guard in enumerate(self._guards)
        ]

    async def gather(self, launcher: Launcher, welcome: Welcome) -> None:
        """Has the guardians started and waits for all of them.

        Raises:
            ClusterFailed: if they cannot start, or one ends.
            OSError: if no port can be opened for them.
        """
        self._ticket = await self._gate.open({MEMBER: self._take, PROCESS: welcome})
        self._launch = await launcher.launch(self._order, self._ticket)
        arriving = asyncio.create_task(self._complete.wait(), name="members-arrive")
        failing = asyncio.create_task(self._launch.failed(), name="launch-fails")
        try:
            await asyncio.wait({arriving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not self._complete.is_set():
                raise ClusterFailed(f"The cluster did not start the processes: {failing.result()}")
        finally:
            arriving.cancel()
            failing.cancel()
        # Processes of a machine have consecutive numbers, whichever connected first.
        self._guards.sort(key=lambda guard: guard.place)

    async def check_folders(self, *, refuse: bool) -> None:
        """Finds out which folders that a process needs it does not see.

        Raises:
            PlacementRefused: if that is to be refused, with every machine and folder.
            ClusterFailed: if a machine does not answer in time.
        """
        wishes = self._order.wishes
        if not wishes.folders and not wishes.written:
            return
        with ExitStack() as stack:
            # What is written now can be seen only where the folder is the same.
            news = {with_news(stack, folder): folder for folder in wishes.written}
            shown = {folder: folder for folder in wishes.folders} | news
            wanted = {str(seen): await asyncio.to_thread(folder_digest, seen) for seen in shown}
            for guard in self._guards:
                guard.tell("look", folders=wanted)
            answers = await self._all([guard.unseen for guard in self._guards], "report which folders they see")
        for guard, unseen in zip(self._guards, answers, strict=True):
            guard.not_seen = [str(shown[Path(seen)]) for seen in unseen]
        refused = [
            f"process {index} on {guard.node} ({guard.address}) does not see {folder} as the service does"
            for index, guard in enumerate(self._guards)
            for folder in guard.not_seen
        ]
        if refused and refuse:
            raise PlacementRefused(refused)

    async def run(self) -> None:
        """Starts the processes.

        Raises:
            ClusterFailed: if one does not start in time.
        """
        order = self._order
        # Engines that give each process devices of its own differ in what they show it; the others show it all of a node.
        own = Counter(guard.place for guard in self._guards)
        placed: Counter[tuple[str, str, str]] = Counter()
        # One of each machine asks one of each other.
        askers = list({guard.address: guard for guard in self._guards}.values())
        for index, guard in enumerate(self._guards):
            place = place_variables(index, order.count, local=(placed[guard.place], own[guard.place]))
            placed[guard.place] += 1
            peers = [(each.address, each.port) for each in askers if each is not guard] if guard in askers else []
            unseen = {UNSEEN_VARIABLE: json.dumps(_names_of(guard.not_seen))} if guard.not_seen else {}
            environment = {**order.environment, **place, **unseen}
            guard.tell("run", module=order.module, flags=list(order.flags), environment=environment, peers=peers)
        await self._all([guard.started for guard in self._guards], "start")

    @property
    def lost(self) -> Mapping[int, bool]:
        """See `port.ProcessGroup`. A guardian reports the end of its process; a lost guardian may have been lost with its
        machine."""
        return {index: not each.process_ended for index, each in enumerate(self._guards) if each.lost.done()}

    async def ended(self) -> str:
        """See `port.ProcessGroup`."""
        lost = [guard.lost for guard in self._guards]
        await asyncio.wait(lost, return_when=asyncio.FIRST_COMPLETED)
        return next(each.result() for each in lost if each.done())

    async def end(self) -> None:
        """See `port.ProcessGroup`."""
        if self._deciding is not None:
            self._deciding.cancel()
        if self._ticket is not None:
            self._gate.forget(self._ticket)
        for guard in self._guards:
            guard.tell("end", grace_s=self._order.stop_grace_s)
        if self._guards:
            # A machine that does not answer is not waited for: its guardian notices the silence.
            await asyncio.wait([guard.lost for guard in self._guards], timeout=self._order.stop_grace_s + 1)
        for guard in self._guards:
            guard.close()
        if self._launch is not None:
            try:
                async with asyncio.timeout(CANCEL_DEADLINE_S):
                    await self._launch.cancel()
            except (ClusterFailed, OSError, TimeoutError) as error:
                # The guardians have lost their connection and end by themselves.
                _log.warning("launch_not_cancelled", reason=str(error))

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        assert self._ticket is not None
        guard = _Guard(reader, writer, self._ticket, self._note_parting)
        try:
            async with asyncio.timeout(self._ticket.silence_s):
                await guard.greet()
        except (OSError, EOFError, TimeoutError, ValueError, KeyError) as error:
            _log.warning("member_refused", reason=str(error))
            writer.close()
            return
        if len(self._guards) >= self._order.count:
            guard.close()
            return
        self._guards.append(guard)
        if len(self._guards) == self._order.count:
            self._complete.set()

    def _note_parting(self, guard: _Guard, address: str) -> None:
        """Notes that a machine does not reach that of an address."""
        self._partings.add(frozenset({guard.address, address}))
        if self._deciding is None or self._deciding.done():
            self._deciding = asyncio.create_task(self._decide(), name="partings-decided")

    async def _decide(self) -> None:
        """Leaves machines out, so that those that are left reach each other."""
        assert self._ticket is not None
        await asyncio.sleep(self._ticket.silence_s / DECISIONS_PER_SILENCE)
        there = [guard for guard in self._guards if not guard.lost.done()]
        processes = Counter(guard.address for guard in there)
        partings = {pair for pair in self._partings if pair <= processes.keys()}
        for address in left_out(partings, processes):
            missed = ", ".join(sorted(each for pair in partings if address in pair for each in pair - {address}))
            for guard in [each for each in there if each.address == address]:
                self._leave_out(guard.node)
                guard.lose(
                    f"{guard.node} ({address}) is left out: it and {missed} could not reach each other for"
                    f" {LIMIT_PER_SILENCE * self._ticket.silence_s:g} s"
                )

    async def _all(self, answers: Sequence["asyncio.Future[Answer]"], what: str) -> list[Answer]:
        """Waits for an answer of every guardian."""
        ending = asyncio.create_task(self.ended(), name="member-ends")
        answered = asyncio.create_task(_results(answers), name="members-answer")
        try:
            async with asyncio.timeout(LOOK_DEADLINE_S):
                await asyncio.wait({ending, answered}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise ClusterFailed(f"The processes did not {what} within {LOOK_DEADLINE_S:g} s.") from None
        finally:
            ending.cancel()
            answered.cancel()
        if not answered.done():
            raise ClusterFailed(f"The processes did not {what}: {ending.result()}.")
        return answered.result()


def _names_of(folders: Sequence[str]) -> list[str]:
    """Returns every name by which a call may have folders."""
    paths = [Path(folder) for folder in folders]
    return sorted({str(name) for each in paths for name in (each, each.absolute(), each.resolve())})


async def _results(answers: Sequence["asyncio.Future[Answer]"]) -> list[Answer]:
    return [await answer for answer in answers]


def with_news(stack: ExitStack, folder: Path) -> Path:
    """Makes a folder in a folder, with a file whose name cannot be guessed; returns it."""
    made = stack.enter_context(TemporaryDirectory(prefix=".shared-", dir=folder))
    (Path(made) / secrets.token_hex(16)).touch()
    return Path(made)
