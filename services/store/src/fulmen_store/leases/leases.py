"""Values passed between runners, the dispatcher and the lease table."""

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
    """A tenant: its database number, name and queue terms."""

    project_id: int
    name: str
    terms: QueueTerms = DEFAULT_TERMS


class LeasedAttempt(NamedTuple):
    """An attempt as leases refer to it; its number is the epoch of its lease."""

    project_id: int
    rollout_id: UUID
    epoch: int


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class Grant:
    """A granted lease: one attempt of one rollout for one session.

    Attributes:
        epoch: Attempt number and fencing epoch.
        request: Stored request, opaque here.
        task_type: Number of its task type; None if it has none.
        continues: Number of the first of the lost attempts that it may continue; 0 if the last one was not lost.
    """

    rollout_id: UUID
    session_id: UUID
    epoch: int
    project_id: int
    request: bytes
    task_type: int | None = None
    continues: int = 0

    @property
    def attempt(self) -> LeasedAttempt:
        """The attempt that runs under this lease."""
        return LeasedAttempt(self.project_id, self.rollout_id, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeCandidate:
    """A running attempt that may be hedged; `age_s` is the age of its lease, seconds."""

    item: ReadyItem
    session_id: UUID
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaClaim:
    """The result of a claim within a quota.

    Attributes:
        tried: Number of leading choices within the quota.
        grants: Granted leases of these choices.
        room: Number of further rollouts that may run.
    """

    tried: int
    grants: list[Grant]
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease in the table, with the fields that determine how its attempt ends.

    Attributes:
        time_left_s: Seconds until the rollout's deadline, negative if it has passed; None without a deadline.
        hedged: Whether another session holds a second lease on the same rollout.
        lost_runners: Runners that died while they ran the rollout, before this one.
        lost_beside: Leases that the session held when it expired, this one included; None if it did not expire.
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
    lost_runners: int = 0
    lost_beside: int | None = None

    @property
    def attempt(self) -> LeasedAttempt:
        """The attempt that runs under this lease."""
        return LeasedAttempt(self.project_id, self.rollout_id, self.epoch)


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class AttemptReport:
    """A report of an attempt's end, by the lease holder or by the store on its behalf.

    Attributes:
        kind: Failure kind; NONE if it succeeded.
        report: Rewards, output and message, opaque here.
        reward: The final reward in it; None without one.
        failure: The failure in its message, in one line; None without a message.
        printed: End of what the agent printed, a stored `PrintedTail`; None without any.
    """

    project_id: int
    rollout_id: UUID
    session_id: UUID
    epoch: int
    kind: FailureKind
    report: bytes = b""
    reward: float | None = None
    failure: str | None = None
    printed: bytes | None = None


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class AttemptEnd:
    """A decided end; written only if the lease has not changed since the decision.

    Attributes:
        lost_runners: Runners to count as died under the rollout, 0 or 1.
    """

    report: AttemptReport
    cancel_requested: bool
    rollout_state: RolloutState
    delay_s: float
    charge: int
    lost_runners: int = 0


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class EndedAttempt:
    """A written end.

    Attributes:
        duration_s: Time for which the lease was held, seconds.
        superseded: Session and epoch of the hedged attempt that ended with it; None without one.
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
    """The stored end of an attempt; distinguishes a repeated report from a stale one."""

    project_id: int
    rollout_id: UUID
    epoch: int
    session_id: UUID
    kind: FailureKind
    report: bytes


class CompletionStatus(IntEnum):
    """Outcome of a report."""

    APPLIED = 1
    DUPLICATE = 2
    LEASE_LOST = 3
    INVALID = 4


class LeaseTable(Protocol):
    """Storage of leases: PostgreSQL, or memory in tests."""

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
        """Writes the ends whose lease is unchanged, in one commit; returns them."""
        ...

    async def end_hedged(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes ends of hedged attempts, at most one per rollout, in one commit.

        An end that leaves the rollout RUNNING keeps the other lease; any other end supersedes it.
        """
        ...

    async def hedgeable(self, project_ids: Sequence[int], limit: int) -> list[HedgeCandidate]:
        """Returns attempts that may be hedged and are not hedged yet, oldest first."""
        ...

    async def claim_hedges(self, choices: Sequence[tuple[UUID, UUID, float]]) -> list[Grant]:
        """Grants second leases by (rollout, session, age) if another session has held the first for `age` seconds."""
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
        subject: User or program that the token identifies.
        project: `projects/{project}`, or `projects/*`.
    """

    subject: str
    project: str
