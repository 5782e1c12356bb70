"""Groups on machines that no engine manages: each offers ranks to one run over a stream that it opens; see `RankService`.

Nothing of a machine is stored: it is there for as long as its stream is. On an order it starts guardians, which call back as
those of every engine do (`remote`).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from fulmen.algorithm.v1 import rank_service_pb2 as pb
from fulmen.errors import QuotaExceeded, Unavailable
from fulmen_algorithm.clients.joined_stream import JoinedStream
from fulmen_algorithm.cluster.gate import Gate
from fulmen_algorithm.cluster.local import exit_text
from fulmen_algorithm.cluster.partings import LeftOut
from fulmen_algorithm.cluster.placement import planned, planned_together
from fulmen_algorithm.cluster.port import GroupOrder, Node, PlacementRefused
from fulmen_algorithm.cluster.remote import LOOK_DEADLINE_S, PINGS_PER_SILENCE, RemoteCluster
from fulmen_algorithm.cluster.wire import Ticket
from fulmen_algorithm.runs.ports import Notify

MAX_MACHINES = 1024
"""Machines of one run."""
Plan = TypeVar("Plan")


class JoinedMachine(JoinedStream[pb.JoinRanksResponse]):
    """The service's end of a machine's stream."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.changed: Callable[[], None] = lambda: None
        self._status: pb.RanksStatus | None = None
        self._order = 0
        loop = asyncio.get_running_loop()
        self._unseen: asyncio.Future[list[str]] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()

    @property
    def is_free(self) -> bool:
        """Whether it reports no running guardian, and none was ordered since."""
        status = self._status
        return not self.has_left and status is not None and (status.order, status.running) == (self._order, 0)

    async def look(self, folders: dict[str, str], *, silence_s: float) -> Sequence[str]:
        """Returns which of some folders, given with the digests of their files, it does not see so.

        Raises:
            Unavailable: if it leaves, or does not answer in time.
        """
        interval = Duration()
        interval.FromMicroseconds(round(silence_s / PINGS_PER_SILENCE * 1e6))
        self.tell(pb.JoinRanksResponse(look=pb.LookAtFolders(folders=folders, status_interval=interval)))
        try:
            async with asyncio.timeout(LOOK_DEADLINE_S):
                return await asyncio.shield(self._unseen)
        except TimeoutError:
            raise Unavailable(
                f"{self.node.name} did not report within {LOOK_DEADLINE_S:g} s which files it sees."
            ) from None

    def start(self, count: int, ticket: Ticket) -> "asyncio.Future[str]":
        """Has it start guardians; returns what happens first: the end of one of them, or of the stream."""
        self._order += 1
        self._ended = asyncio.get_running_loop().create_future()
        order = pb.StartRanks(order=self._order, count=count, ticket=ticket.text())
        self.tell(pb.JoinRanksResponse(start=order))
        return self._ended

    def end(self) -> None:
        """Has it end them."""
        if not self.has_left:
            self.tell(pb.JoinRanksResponse(end=pb.EndRanks(order=self._order)))

    def hear(self, message: pb.JoinRanksRequest) -> None:
        """Takes a message of the machine."""
        self.heard()
        match message.WhichOneof("message"):
            case "seen" if not self._unseen.done():
                self._unseen.set_result(list(message.seen.unseen))
            case "status":
                self._status = message.status
                self.changed()
            case "ended" if message.ended.order == self._order:
                self._end(f"a process on {self.node.name} {exit_text(message.ended.status)}")

    def leave(self) -> None:
        """See `JoinedStream`."""
        super().leave()
        self._end(f"{self.node.name} has left")
        if not self._unseen.done():
            self._unseen.set_exception(Unavailable(f"{self.node.name} has left."))
            self._unseen.exception()  # possibly no one waits for it
        self.changed()

    def _end(self, text: str) -> None:
        if not self._ended.done():
            self._ended.set_result(text)


class JoinedMachines:
    """The machines that have joined, by run."""

    def __init__(self) -> None:
        self._machines: dict[str, dict[str, JoinedMachine]] = {}
        self._changes: dict[str, asyncio.Event] = {}

    def add(self, training_run: str, machine: JoinedMachine) -> None:
        """Adds a machine.

        Raises:
            Unavailable: if another one has its name.
            QuotaExceeded: if the run has too many.
        """
        machines = self._machines.setdefault(training_run, {})
        name = machine.node.name
        if name in machines:
            raise Unavailable(
                f"Another machine of {training_run} has the name {name}: join again, or use another name."
            )
        if len(machines) >= MAX_MACHINES:
            raise QuotaExceeded(f"{training_run} has {MAX_MACHINES} machines.", quota="machines")
        machines[name] = machine
        machine.changed = lambda: self._change(training_run)
        machine.changed()

    def remove(self, training_run: str, machine: JoinedMachine) -> None:
        """Removes a machine."""
        machines = self._machines[training_run]
        del machines[machine.node.name]
        if not machines:
            del self._machines[training_run]
        self._change(training_run)

    def of(self, training_run: str) -> list[JoinedMachine]:
        """Returns the machines of a run, by name."""
        return [machine for _, machine in sorted(self._machines.get(training_run, {}).items())]

    async def change(self, training_run: str) -> None:
        """Waits for a change of a run's machines."""
        await self._changes.setdefault(training_run, asyncio.Event()).wait()

    def free(self, training_run: str) -> list[Node]:
        """Returns a run's machines that run no ranks."""
        return [machine.node for machine in self.of(training_run) if machine.is_free]

    async def until_planned(
        self,
        training_run: str,
        plan: Callable[[Sequence[Node]], Plan],
        missing: Callable[[PlacementRefused], None] = lambda refused: None,
    ) -> Plan:
        """Waits until something fits the free machines of a run; returns its plan. `missing` is called with the reason while
        nothing fits."""
        while True:
            try:
                return plan(self.free(training_run))
            except PlacementRefused as refused:
                missing(refused)
            await self.change(training_run)

    def _change(self, training_run: str) -> None:
        if changed := self._changes.pop(training_run, None):
            changed.set()


class JoinedCluster(RemoteCluster):
    """See `port.Cluster`; `of_run` returns the cluster of a run, which has machines."""

    def __init__(
        self,
        machines: JoinedMachines,
        gate: Gate,
        *,
        start_deadline_s: float,
        left_out: LeftOut | None = None,
        training_run: str = "",
        notify: Notify = lambda severity, text: None,
    ) -> None:
        """`start_deadline_s` includes the time until there are enough machines."""
        launcher = _RunMachines(machines, training_run)
        super().__init__(launcher, gate, start_deadline_s=start_deadline_s, left_out=left_out, shares_folders=False)
        self._machines, self._run, self._notify = machines, training_run, notify

    def of_run(self, training_run: str, notify: Notify) -> "JoinedCluster":
        """Returns the cluster of the machines that join a run."""
        return JoinedCluster(
            self._machines,
            self._gate,
            start_deadline_s=self._start_deadline_s,
            left_out=self._left_out,
            training_run=training_run,
            notify=notify,
        )

    async def plan(self, *orders: GroupOrder) -> str:
        """See `port.Cluster`. Waits until there are enough machines, and reports meanwhile what is missing."""
        reasons: Sequence[str] = ()

        def missing(refused: PlacementRefused) -> None:
            nonlocal reasons
            if refused.reasons != reasons:
                reasons = refused.reasons
                self._notify("info", f"Waiting for machines: {self._who()}; {refused}. {_how(self._run)}")

        try:
            async with asyncio.timeout(self._start_deadline_s):
                return await self._machines.until_planned(
                    self._run, lambda nodes: planned_together(orders, nodes), missing
                )
        except TimeoutError:
            waited = f"this has not changed for {self._start_deadline_s:g} s, and {self._who()}"
            raise PlacementRefused([*reasons, waited]) from None

    async def _nodes(self) -> Sequence[Node] | None:
        """See `RemoteCluster`. Machines that run ranks of the run have the room that they had before."""
        return [machine.node for machine in self._machines.of(self._run)]

    def _who(self) -> str:
        machines = self._machines.of(self._run)
        each = [f"{one.node.name} ({one.node.most}{'' if one.is_free else ', busy'})" for one in machines]
        return f"joined are {', '.join(each)}" if each else "none has joined"


class _RunMachines:
    """See `remote.Launcher`: the machines of one run."""

    def __init__(self, machines: JoinedMachines, training_run: str) -> None:
        self._machines, self._run = machines, training_run

    async def nodes(self) -> Sequence[Node]:
        """See `remote.Launcher`."""
        return self._machines.free(self._run)

    def together(self, order: GroupOrder) -> int:
        """See `remote.Launcher`."""
        return 1

    async def launch(self, order: GroupOrder, ticket: Ticket) -> "_Started":
        """See `remote.Launcher`. Waits until there are enough machines; the start's deadline ends that."""
        shares = await self._machines.until_planned(self._run, lambda nodes: planned(order, nodes))
        machines = {machine.node.name: machine for machine in self._machines.of(self._run)}
        return _Started({machines[name]: machines[name].start(count, ticket) for name, count in shares})


class _Started:
    """See `remote.Launch`."""

    def __init__(self, ended: "dict[JoinedMachine, asyncio.Future[str]]") -> None:
        self._ended = ended

    async def failed(self) -> str:
        """See `remote.Launch`."""
        done, _ = await asyncio.wait(self._ended.values(), return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()

    async def cancel(self) -> None:
        """See `remote.Launch`."""
        for machine in self._ended:
            machine.end()


def _how(training_run: str) -> str:
    name, project = training_run.rpartition("/")[2], training_run.split("/")[1]
    issue = f"fulmen token issue --role rank --project {project} --run {name} --subject MACHINE"
    return f"On each machine run `fulmen-rank serve` with a token of `{issue}` (docs/clusters.md)."
