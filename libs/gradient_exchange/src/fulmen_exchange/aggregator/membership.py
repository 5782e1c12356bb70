"""Membership of an exchange.

Invariant: every change begins a new epoch, and no two sets of members ever have the same one, whatever is restarted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

Key = tuple[int, int]
"""Round of a sum, and its index within the round."""


@dataclass(slots=True, kw_only=True)
class Member:
    """A participating rank.

    Attributes:
        rank: The rank, from 0.
        incarnation: Identifies its process.
        first_round: First round in which it participates.
        seen_s: Time of its last message.
        position: Newest sum for which it has sent anything.
        late: Number of sums made without it.
    """

    rank: int
    incarnation: str
    first_round: int
    seen_s: float
    position: Key = (0, 0)
    late: int = 0


@dataclass(slots=True, kw_only=True)
class Membership:
    """The members of one run.

    Attributes:
        world_size: Number of members with which the first round begins.
        lease_s: A member that is silent for this long is removed.
        epoch: Grows with every change.
        is_started: Whether enough members have joined; reset once all have left.
    """

    world_size: int
    lease_s: float
    epoch: int = 0
    is_started: bool = False
    _members: dict[int, Member] = field(default_factory=dict)
    _awaited: int | None = None
    _patient_until_s: float | None = None

    @property
    def ranks(self) -> list[int]:
        """Ranks of the members, ascending."""
        return sorted(self._members)

    def all(self) -> list[Member]:
        """Returns the members by rank."""
        return [self._members[rank] for rank in self.ranks]

    def get(self, rank: int, incarnation: str) -> Member | None:
        """Returns a member, unless another process has its rank."""
        member = self._members.get(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def is_taken(self, rank: int, incarnation: str) -> bool:
        """Returns whether another process has a rank."""
        return rank in self._members and self.get(rank, incarnation) is None

    def of_round(self, number: int) -> list[Member]:
        """Returns the members that participate in a round, by rank."""
        return [member for member in self.all() if member.first_round <= number]

    def resume(self, *, epoch: int, known: int, until_s: float) -> None:
        """Adopts the epoch and size of an exchange that another process served before.

        Args:
            epoch: Epoch that the member knew.
            known: Number of members it knew; no more are waited for.
            until_s: When to continue with those present.
        """
        self.epoch = max(self.epoch, epoch)
        if not self.is_started and known:
            self._awaited = min(self.world_size if self._awaited is None else self._awaited, known)
            self._patient_until_s = until_s if self._patient_until_s is None else self._patient_until_s

    def add(self, member: Member) -> bool:
        """Adds a member or renews its lease; returns whether the members changed."""
        known = self.get(member.rank, member.incarnation)
        if known is not None:
            known.seen_s = member.seen_s
            if known.position == (0, 0):
                known.first_round = max(known.first_round, member.first_round)
            return False
        self._members[member.rank] = member
        self._change()
        return True

    def remove(self, ranks: Collection[int]) -> bool:
        """Removes members; returns whether there were any."""
        gone = [rank for rank in ranks if self._members.pop(rank, None) is not None]
        if gone:
            self._change()
        return bool(gone)

    def expired(self, now_s: float) -> list[int]:
        """Returns the ranks of members whose lease has expired."""
        return [member.rank for member in self.all() if now_s >= member.seen_s + self.lease_s]

    def start_if_due(self, now_s: float) -> None:
        """Starts once the expected members are present, or the wait after a restart is over."""
        awaited = self.world_size if self._awaited is None else self._awaited
        patient = self._patient_until_s is None or now_s < self._patient_until_s
        if len(self._members) >= awaited or (self._members and not patient):
            self.is_started = True

    def _change(self) -> None:
        self.epoch += 1
        if not self._members:
            self.is_started, self._awaited, self._patient_until_s = False, None, None
