"""Which joined engine of a run fetches versions from which: a tree below the service, in the order of joining.

So the service's line carries a version a few times, however many engines there are. Parents have joined before their
children, so no engine waits for itself.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

PATIENCE_S: Final = 5.0
"""Patience with a parent that fetches from the service, in seconds; below, each waits so much longer than its parent does."""
MAX_FAILURES: Final = 2
"""An engine of which so many children complain has no more; one that complains of so many parents has the service alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where other agents fetch what an agent has.

    Attributes:
        name: Id of its engine.
        target: `host:port`; empty if they cannot.
        key: Token for it. Secret.
    """

    name: str = ""
    target: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Parent:
    """From where an engine fetches.

    Attributes:
        engine: The engine.
        patience_s: Time in which its agent has to send something, in seconds.
    """

    engine: "TreeMember"
    patience_s: float


@dataclass(frozen=True, slots=True)
class Needed:
    """What an engine fetches.

    Attributes:
        version: Number of the version.
        whole: Whether all weights, because it has nothing yet or they were published so.
    """

    version: int
    whole: bool = False


class TreeMember(Protocol):
    """An engine in a tree; two are the same if they are one object."""

    @property
    def peer(self) -> PeerAddress:
        """Address at which others fetch its versions."""
        ...

    def may_have(self, needed: "Needed") -> bool:
        """Returns whether it has what another needs, or will be told to fetch it no later than that one."""
        ...


class PeerTree:
    """The joined engines of one run."""

    def __init__(self, fan_out: int) -> None:
        """`fan_out` is the number of engines that fetch from the service, and from each engine; 0: all from the service."""
        self._fan_out = fan_out
        self._members: list[TreeMember] = []
        self._failed: list[tuple[TreeMember, TreeMember]] = []

    def __len__(self) -> int:
        """Returns the number of engines."""
        return len(self._members)

    def join(self, member: TreeMember) -> None:
        """Adds an engine."""
        self._members.append(member)

    def leave(self, member: TreeMember) -> None:
        """Removes an engine, and what is known of it."""
        self._members.remove(member)
        self._failed = [pair for pair in self._failed if member not in pair]

    def failed(self, child: TreeMember, parent: TreeMember) -> None:
        """Notes that a child could not fetch from a parent; it gets another one from now on."""
        if {child, parent} <= {*self._members} and (child, parent) not in self._failed:
            self._failed.append((child, parent))

    def parent_of(self, child: TreeMember, needed: Needed) -> Parent | None:
        """Returns from which engine one fetches what it needs; None for the service."""
        if not self._fan_out or child not in self._members:
            return None
        complaints = Counter(parent for _, parent in self._failed)
        trouble = Counter(member for member, _ in self._failed)
        # A place for each child that one may have: whose it is, and how far from the service.
        places: list[tuple[TreeMember | None, int]] = [(None, 0)] * self._fan_out
        for member in self._members:
            fit = [place for place in places if (member, place[0]) not in self._failed]
            place = fit[0] if fit and trouble[member] < MAX_FAILURES else (None, 0)
            if place in places:
                places.remove(place)
            if member is child:
                parent, depth = place
                return None if parent is None else Parent(parent, PATIENCE_S * depth)
            if member.peer.target and complaints[member] < MAX_FAILURES and member.may_have(needed):
                places += [(member, place[1] + 1)] * self._fan_out
        raise AssertionError("a member has a place")
