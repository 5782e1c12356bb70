"""What starts groups of processes: the port of all clusters, and the orders to them.

Fulmen places nothing itself: an adapter hands the group to an engine that does. Invariant: what is started never outlives
the process that started it, and every wait has a deadline.
"""

from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

STOP_GRACE_S = 10.0
"""Time for processes to end by themselves before they are killed, in seconds."""
START_DEADLINE_S = 300.0
"""Timeout of starting a group on this machine, in seconds."""

Welcome = Callable[[StreamReader, StreamWriter], Awaitable[None]]
"""Takes a connection of a process of the group."""


class ClusterFailed(Exception):
    """A group could not be started; the message has the reason."""


class PlacementRefused(Exception):
    """A group does not fit the cluster, or its processes do not see what they need.

    Attributes:
        reasons: Every reason.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


class Affinity(StrEnum):
    """Where the processes of a group run."""

    PACK = "pack"
    SPREAD = "spread"
    ONE_NODE = "one_node"
    OWN_NODES = "own_nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a process needs, or a node has; None is unknown.

    Attributes:
        cpus: CPUs.
        gpus: GPUs.
        memory_bytes: Memory, in bytes.
    """

    cpus: int | None = 0
    gpus: int | None = 0
    memory_bytes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a cluster.

    Attributes:
        name: Its name.
        has: Its resources.
        most: Processes that it takes at most; None for as many as there is room for.
    """

    name: str
    has: Resources
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How the processes of a group are placed.

    Attributes:
        each: What each process needs.
        affinity: Where they run: on few nodes (`pack`), on many (`spread`), all on one (`one_node`), each on its own (`own_nodes`).
        folders: Folders that every process must see with the same files.
        written: Folders in which every process must see what this process writes.
        without: Names of nodes that are not used.
        together: Processes that are placed as one, such as those of a pod; 0: as many as the cluster allows.
    """

    each: Resources = Resources()
    affinity: Affinity = Affinity.PACK
    folders: Sequence[Path] = ()
    written: Sequence[Path] = ()
    without: Collection[str] = ()
    together: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """A group of processes.

    Attributes:
        module: A module of ours, which each of them runs; it calls back by the ticket in its environment (`wire.Ticket`).
        flags: Arguments of the module.
        environment: Variables of each process besides those of its node.
        count: Number of processes.
        wishes: How they are placed.
        stop_grace_s: Time for them to end by themselves before they are killed, in seconds.
    """

    module: str
    count: int
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wishes: Wishes = Wishes()
    stop_grace_s: float = STOP_GRACE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of a group.

    Attributes:
        index: Its place, from 0; members of a node follow each other.
        node: Name of the node.
        address: Address of the node on the way to this process.
        pid: Process id on the node.
    """

    index: int
    node: str
    address: str
    pid: int


class ProcessGroup(Protocol):
    """A started group."""

    @property
    def members(self) -> Sequence[Member]:
        """The processes, by index."""

    @property
    def lost(self) -> Mapping[int, bool]:
        """Processes that are known to have ended or to be silent, by index; True where their machine may be lost as well."""

    async def ended(self) -> str:
        """Waits until the first of them ends or is silent for too long; returns what happened."""

    async def end(self) -> None:
        """Lets them end for the order's `stop_grace_s`, then kills the rest; idempotent."""


class Cluster(Protocol):
    """Starts groups."""

    async def plan(self, *orders: GroupOrder) -> str:
        """Plans where the processes of some groups would run together; returns it as a sentence.

        Machines may be waited for.

        Raises:
            PlacementRefused: with every reason, if they never could.
            ClusterFailed: if the cluster does not answer.
        """

    async def room(self, order: GroupOrder, *, without: Collection[str] = ()) -> int:
        """Returns how many processes of a group there is room for, at most all; nodes of some names do not count.

        Raises:
            ClusterFailed: if the cluster does not answer.
        """

    async def start(self, order: GroupOrder, welcome: Welcome) -> ProcessGroup:
        """Starts a group; returns when all its processes run. `welcome` gets the connections they make.

        Raises:
            ClusterFailed: if they do not start in time.
            PlacementRefused: if some do not see the folders that they need.
        """
