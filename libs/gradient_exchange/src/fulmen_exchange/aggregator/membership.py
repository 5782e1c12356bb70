"""Who takes part in an exchange.

Invariant: every change of members begins a new epoch, and no two sets of members ever have the same one, whatever was
restarted meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

Key = tuple[int, int]
"""A sum: round, and which of the round's."""


@dataclass(slots=True, kw_only=True)
class Member:
    """A rank that takes part.

    Attributes:
        rank: From 0.
        incarnation: Tells its processes apart.
        first_round: The round that it takes part in first.
        seen_s: When it was heard last.
        position: The newest sum for which it has sent anything.
        late: Sums that were made without it.
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
        world_size: Members with which the first round begins.
        lease_s: A member that is silent for so long is removed.
        epoch: Grows with every change.
        is_started: Whether as many have come; again not, once all are gone.
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
        """The ranks of the members, ascending."""
        return sorted(self._members)

    def all(self) -> list[Member]:
        """Returns the members by rank."""
        return [self._members[rank] for rank in self.ranks]

    def get(self, rank: int, incarnation: str) -> Member | None:
        """Returns a member, unless another process has its rank."""
        member = self._members.get(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def is_taken(self, rank: int, incarnation: str) -> bool:
        """Tells whether another process has a rank."""
        return rank in self._members and self.get(rank, incarnation) is None

    def of_round(self, number: int) -> list[Member]:
        """Returns the members that take part in a round, by rank."""
        return [member for member in self.all() if member.first_round <= number]

    def resume(self, *, epoch: int, known: int, until_s: float) -> None:
        """Goes on from what a member knew of an exchange that this process has not seen, or has forgotten.

        Args:
            epoch: That the member knew.
            known: How many members it knew; no more are waited for.
            until_s: When those who are there by then go on.
        """
        self.epoch = max(self.epoch, epoch)
        if not self.is_started and known:
            self._awaited = min(self.world_size if self._awaited is None else self._awaited, known)
            self._patient_until_s = until_s if self._patient_until_s is None else self._patient_until_s

    def add(self, member: Member) -> bool:
        """Takes a member in, or renews its lease; tells whether the members have changed."""
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
        """Ends memberships; tells whether there were any."""
        gone = [rank for rank in ranks if self._members.pop(rank, None) is not None]
        if gone:
            self._change()
        return bool(gone)

    def expired(self, now_s: float) -> list[int]:
        """Returns the ranks of the members that were silent too long."""
        return [member.rank for member in self.all() if now_s >= member.seen_s + self.lease_s]

    def start_if_due(self, now_s: float) -> None:
        """Begins once as many are there as are waited for, or were waited for long enough after a restart."""
        awaited = self.world_size if self._awaited is None else self._awaited
        patient = self._patient_until_s is None or now_s < self._patient_until_s
        if len(self._members) >= awaited or (self._members and not patient):
            self.is_started = True

    def _change(self) -> None:
        self.epoch += 1
        if not self._members:
            self.is_started, self._awaited, self._patient_until_s = False, None, None
