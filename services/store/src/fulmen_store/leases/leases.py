"""The values that pass between runners, the dispatcher and the lease table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol
from uuid import UUID

from fulmen_store.rollouts.transitions import FailureKind, RetryPolicy, RolloutState
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.rules import DEFAULT_TERMS, QueueTerms

__all__ = [
    "AttemptEnd",
    "AttemptReport",
    "CompletionStatus",
    "EndedAttempt",
    "EndedReport",
    "Grant",
    "HedgeCandidate",
    "HeldLease",
    "LeaseTable",
    "LeasedAttempt",
    "Project",
    "QuotaClaim",
    "SessionOwner",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A tenant: its database number, its name, and the terms by which its rollouts are handed out."""

    project_id: int
    name: str
    terms: QueueTerms = DEFAULT_TERMS


class LeasedAttempt(NamedTuple):
    """An attempt as leases refer to it; the epoch of its lease is its number."""

    project_id: int
    rollout_id: UUID
    epoch: int


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class Grant:
    """A lease that was granted: one attempt of one rollout for one session.

    Attributes:
        epoch: Attempt's number and fencing epoch.
        request: Stored request, opaque here.
    """

    rollout_id: UUID
    session_id: UUID
    epoch: int
    project_id: int
    request: bytes

    @property
    def attempt(self) -> LeasedAttempt:
        """The attempt that runs under it."""
        return LeasedAttempt(self.project_id, self.rollout_id, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeCandidate:
    """A running attempt that may be hedged; `age_s` is for how long its lease is held, seconds."""

    item: ReadyItem
    session_id: UUID
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaClaim:
    """What a claim within a quota did.

    Attributes:
        tried: Number of choices, from the first on, within the quota.
        grants: Those of them that were given.
        room: Number of more may run.
    """

    tried: int
    grants: list[Grant]
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease in the table, with the fields that decide how its attempt ends.

    Attributes:
        time_left_s: Seconds until the rollout's deadline, below 0 if it has passed; None if it has none.
        hedged: Whether another session holds a second lease on the same rollout.
    """

    rollout_id: UUID
    session_id: UUID
    epoch: int
    project_id: int
    charged: int
    policy: RetryPolicy
    cancel_requested: bool
    time_left_s: float | None = None
    hedged: bool = False

    @property
    def attempt(self) -> LeasedAttempt:
        """The attempt that runs under it."""
        return LeasedAttempt(self.project_id, self.rollout_id, self.epoch)


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class AttemptReport:
    """A report of an attempt's end, by the lease holder or by the store on its behalf.

    Attributes:
        kind: Why it failed; NONE if it succeeded.
        report: Rewards, output and message, opaque here.
    """

    project_id: int
    rollout_id: UUID
    session_id: UUID
    epoch: int
    kind: FailureKind
    report: bytes = b""


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class AttemptEnd:
    """A decided end, written only if the lease is still as it was when it was decided."""

    report: AttemptReport
    cancel_requested: bool
    rollout_state: RolloutState
    delay_s: float
    charge: int


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class EndedAttempt:
    """An end that was written.

    Attributes:
        duration_s: How long the lease was held, seconds.
        superseded: Session and epoch of the attempt beside it that ended with it; None if there was none.
    """

    item: ReadyItem
    session_id: UUID
    epoch: int
    kind: FailureKind
    rollout_state: RolloutState
    duration_s: float = 0.0
    superseded: tuple[UUID, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedReport:
    """The stored end of an attempt, which distinguishes a repeated report from a stale one."""

    project_id: int
    rollout_id: UUID
    epoch: int
    session_id: UUID
    kind: FailureKind
    report: bytes


class CompletionStatus(IntEnum):
    """What the store did with a report."""

    APPLIED = 1
    DUPLICATE = 2
    LEASE_LOST = 3
    INVALID = 4


class LeaseTable(Protocol):
    """Where leases live: PostgreSQL, or the memory of a test."""

    async def claim(self, choices: Sequence[tuple[UUID, UUID]]) -> list[Grant]:
        """Grants a lease to each (rollout, session) pair whose rollout waits; returns the grants."""
        ...

    async def claim_within(self, project_id: int, choices: Sequence[tuple[UUID, UUID]]) -> QuotaClaim:
        """Claims rollouts of one project in order, up to its quota."""
        ...

    async def held(self, rollout_ids: Sequence[UUID]) -> list[HeldLease]:
        """Returns the leases on these rollouts."""
        ...

    async def held_by(self, session_ids: Sequence[UUID]) -> list[HeldLease]:
        """Returns the leases of these sessions."""
        ...

    async def orphaned(self, limit: int) -> list[HeldLease]:
        """Returns leases whose session has ended."""
        ...

    async def end(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes those ends whose lease is unchanged, in one commit; returns them."""
        ...

    async def end_hedged(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes ends of hedged attempts, at most one per rollout, in one commit.

        An end that leaves the rollout RUNNING leaves the other lease as it is; any other supersedes it.
        """
        ...

    async def hedgeable(self, project_ids: Sequence[int], limit: int) -> list[HedgeCandidate]:
        """Returns attempts that may be hedged and are not yet, oldest first."""
        ...

    async def claim_hedges(self, choices: Sequence[tuple[UUID, UUID, float]]) -> list[Grant]:
        """Grants each (rollout, session) a second lease if another session has held the first one for the given seconds."""
        ...

    async def ended(self, keys: Sequence[tuple[UUID, int]]) -> list[EndedReport]:
        """Returns the stored ends of attempts named by (rollout, epoch)."""
        ...

    async def projects(self) -> list[Project]:
        """Returns all projects."""
        ...

    async def oldest(self, project_id: int, *, per_priority: int) -> list[tuple[ReadyItem, float]]:
        """Returns the oldest waiting items of each sort_priority, each with the seconds until it may run."""
        ...

    async def waiting(self, project_id: int, *, after: tuple[int, UUID], limit: int) -> list[tuple[ReadyItem, float]]:
        """Returns one page of waiting items in order, each with the seconds until it may run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOwner:
    """The owner of a session: only a token of the same subject and project may resume it.

    Attributes:
        subject: Who the token was issued for.
        project: `projects/{project}`, or `projects/*`.
    """

    subject: str
    project: str
