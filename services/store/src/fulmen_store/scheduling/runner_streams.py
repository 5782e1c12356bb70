"""Streams of the runners connected to this replica, with their credit and outboxes.

Invariant: a stream never gets more assignments than it granted credits, nor more bytes than it has room for until those
before were sent, so its outbox is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from fulmen.errors import FulmenError
from fulmen_store.leases.leases import CompletionStatus, EndedAttempt, Grant, LeasedAttempt
from fulmen_store.rollouts.requests import MAX_STORED_BYTES
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.rules import DEFAULT_RULES, QueueRules

__all__ = [
    "Acknowledged",
    "Acknowledgement",
    "Assigned",
    "CancelRequested",
    "Drained",
    "LeasesLost",
    "Notice",
    "Outbox",
    "RunnerDone",
    "RunnerOrdered",
    "RunnerStream",
    "RunnerStreams",
    "StreamClosed",
]

MAX_CREDIT: Final = 10_000
# Upper bound of an assignment without its request: names, key and limits.
ASSIGNMENT_BYTES: Final = 1024
MAX_ASSIGNMENT_BYTES: Final = MAX_STORED_BYTES + ASSIGNMENT_BYTES
OUTBOX_BYTES: Final = 16 * 1024 * 1024
# Number of streams with credit that are searched for affinity to a new item.
AFFINITY_WINDOW: Final = 16
MAX_MERGED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Assignments for the runner."""

    grants: Sequence[Grant]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Attempts that the runner should stop."""

    attempts: Sequence[LeasedAttempt]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesLost:
    """Attempts that the runner no longer holds."""

    attempts: Sequence[LeasedAttempt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The replica is shutting down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """The session has ended, or another stream was opened for it."""


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class Acknowledgement:
    """The answer to one report or release."""

    attempt: str
    status: CompletionStatus
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """Answers to reports and releases, after their commit."""

    answers: Sequence[Acknowledgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDone:
    """The runner closed its side of the stream, or sent a message that ends it."""

    error: FulmenError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOrdered:
    """What people ordered the runner to do.

    Attributes:
        number: Number of the last order.
        slots: Number of slots, 0 for automatic; None if none was ordered.
        drains: Whether to drain.
        grace_s: Grace of running attempts, seconds; None is the runner's setting.
    """

    number: int
    slots: int | None = None
    drains: bool = False
    grace_s: float | None = None


_NoticeT = TypeVar("_NoticeT", Assigned, Acknowledged)
Notice = Acknowledged | RunnerDone | Assigned | CancelRequested | LeasesLost | RunnerOrdered | Drained | StreamClosed


class Outbox:
    """Notices for one runner, in order. Merges adjacent assignments and adjacent acknowledgements."""

    def __init__(self) -> None:
        self._waiting: deque[Notice] = deque()
        self._arrived = asyncio.Event()

    def put(self, notice: Notice) -> None:
        """Adds a notice."""
        self._waiting.append(notice)
        self._arrived.set()

    async def wait(self) -> None:
        """Waits for a notice."""
        await self._arrived.wait()

    def take(self) -> Notice | None:
        """Removes and returns the next notice, merged with following ones of the same kind; None if empty."""
        if not self._waiting:
            return None
        first = self._waiting.popleft()
        if isinstance(first, Assigned):
            first = Assigned(grants=[*first.grants, *(grant for one in self._alike(Assigned) for grant in one.grants)])
        elif isinstance(first, Acknowledged):
            answers = [answer for one in self._alike(Acknowledged) for answer in one.answers]
            first = Acknowledged(answers=[*first.answers, *answers])
        if not self._waiting:
            self._arrived.clear()
        return first

    def _alike(self, kind: type[_NoticeT]) -> list[_NoticeT]:
        found: list[_NoticeT] = []
        while len(found) < MAX_MERGED and self._waiting and isinstance(self._waiting[0], kind):
            found.append(self._waiting.popleft())  # type: ignore[arg-type]
        return found


@dataclass(slots=True, kw_only=True, eq=False)
class RunnerStream:
    """The open stream of one runner session.

    Attributes:
        labels: `key=value` strings of the runner.
        projects: Projects that it serves; None for all.
        credit: Number of further assignments that it accepts.
        room_bytes: Size of further assignments that can be sent to it.
        reserved: Sizes of the assignments that are being claimed for it, by rollout.
        leases: Attempts sent to it, by rollout.
        takes_orders: Whether it can be sent orders; a call that only acquires leases cannot.
        sent_order: Number of the last order that was sent to it.
        alone: Whether it runs one rollout alone, or finishes what it runs before it does; it gets nothing else.
        last_group: Group of the last assigned item.
        last_agent: Agent version of the last assigned item.
    """

    session_id: UUID
    labels: frozenset[str]
    projects: frozenset[int] | None
    credit: int = 0
    room_bytes: int = OUTBOX_BYTES
    reserved: dict[UUID, int] = field(default_factory=dict)
    closed: bool = False
    outbox: Outbox = field(default_factory=lambda: Outbox())
    leases: dict[UUID, LeasedAttempt] = field(default_factory=dict)
    takes_orders: bool = True
    sent_order: int = 0
    alone: bool = False
    last_group: UUID | None = None
    last_agent: int | None = None

    @property
    def can_take(self) -> bool:
        """Whether another assignment can be sent to it, however large."""
        return self.credit > 0 and self.room_bytes >= MAX_ASSIGNMENT_BYTES

    def qualifies(self, item: ReadyItem, *, match_labels: bool = True) -> bool:
        """Returns whether the runner may run an item; ignores labels unless `match_labels`."""
        if self.projects is not None and item.project_id not in self.projects:
            return False
        return not match_labels or item.labels <= self.labels

    def assign(self, item: ReadyItem) -> None:
        """Uses one credit for an item, and room."""
        self.credit -= 1
        self.reserved[item.rollout_id] = size_bytes = item.request_bytes + ASSIGNMENT_BYTES
        self.room_bytes -= size_bytes
        self.last_group, self.last_agent = item.group_key, item.agent

    def refund(self, rollout_id: UUID) -> None:
        """Returns the credit and the room of an assignment that was not made."""
        self.room_bytes += self.reserved.pop(rollout_id)
        if not self.closed:
            self.credit += 1

    def lease(self, attempt: LeasedAttempt) -> None:
        """Records an assignment that was made."""
        self.reserved.pop(attempt.rollout_id, None)
        self.leases[attempt.rollout_id] = attempt

    def make_room(self) -> None:
        """Records that everything that was assigned is sent."""
        self.room_bytes = OUTBOX_BYTES - sum(self.reserved.values())

    def affinity(self, item: ReadyItem) -> int:
        """Returns 2 if the last item had the same group, 1 if it had the same agent version, otherwise 0."""
        if item.group_key is not None and item.group_key == self.last_group:
            return 2
        return int(item.agent is not None and item.agent == self.last_agent)

    def send(self, notice: Notice) -> None:
        """Queues a notice for the runner."""
        self.outbox.put(notice)

    def send_order(self, order: RunnerOrdered) -> None:
        """Queues an order for the runner unless it was sent before."""
        if self.takes_orders and order.number > self.sent_order:
            self.sent_order = order.number
            self.send(order)


class RunnerStreams:
    """The open streams of this replica by session, in round-robin order."""

    def __init__(self) -> None:
        self._streams: dict[UUID, RunnerStream] = {}
        self._turns: deque[RunnerStream] = deque()
        self._active: set[UUID] = set()

    def __len__(self) -> int:
        """Returns the number of open streams."""
        return len(self._streams)

    def attach(self, stream: RunnerStream) -> None:
        """Adds a stream and closes the previous one of the same session."""
        older = self._streams.get(stream.session_id)
        if older is not None:
            self.detach(older)
            older.send(StreamClosed())
        self._streams[stream.session_id] = stream
        self._turns.append(stream)

    def detach(self, stream: RunnerStream) -> None:
        """Closes a stream and drops its credit."""
        stream.closed = True
        stream.credit = 0
        if self._streams.get(stream.session_id) is stream:
            del self._streams[stream.session_id]

    def find(self, session_id: UUID) -> RunnerStream | None:
        """Returns the open stream of a session."""
        return self._streams.get(session_id)

    def with_credit(self) -> list[RunnerStream]:
        """Returns the streams that can take something in round-robin order, and advances the order by one."""
        while self._turns and self._turns[0].closed:
            self._turns.popleft()
        if len(self._turns) > 2 * len(self._streams) + 16:
            self._turns = deque(stream for stream in self._turns if not stream.closed)
        waiting = [stream for stream in self._turns if stream.can_take]
        self._turns.rotate(-1)
        return waiting

    def next_for(
        self, item: ReadyItem, rules: QueueRules = DEFAULT_RULES, *, exclude: UUID | None = None
    ) -> RunnerStream | None:
        """Returns the stream that gets an item: the next one that qualifies, or a later one with more affinity.

        Skips the session `exclude`.
        """
        passed: list[RunnerStream] = []
        found, best = None, -1
        for _ in range(len(self._turns)):
            stream = self._turns.popleft()
            if stream.closed:
                continue
            able = stream.can_take and not stream.alone and stream.session_id != exclude
            if not able or not stream.qualifies(item, match_labels=rules.match_labels):
                self._turns.append(stream)
                continue
            passed.append(stream)
            own = stream.affinity(item)
            if own > best:
                found, best = stream, own
            if not rules.affinity or best >= item.max_affinity or len(passed) >= AFFINITY_WINDOW:
                break
        # Skipped streams keep their turns.
        self._turns.extendleft(stream for stream in reversed(passed) if stream is not found)
        if found is not None:
            self._turns.append(found)
        return found

    def open_credit(self, project_id: int | None = None) -> int:
        """Returns the unused credit, in total or for one project."""
        return sum(
            stream.credit
            for stream in self._streams.values()
            if project_id is None or stream.projects is None or project_id in stream.projects
        )

    def mark_active(self, session_id: UUID) -> None:
        """Marks a session as active; the lease renewer extends it."""
        self._active.add(session_id)

    def drain_active(self) -> set[UUID]:
        """Returns the sessions that were active since the last call."""
        active, self._active = self._active, set()
        return active

    def send_each(self, notices: Iterable[tuple[UUID, Notice]]) -> None:
        """Sends notices to the sessions whose streams are open here."""
        for session_id, notice in notices:
            stream = self._streams.get(session_id)
            if stream is not None:
                stream.send(notice)

    def remove_leases(self, ended: Iterable[EndedAttempt]) -> None:
        """Removes the leases of ended and superseded attempts."""
        for attempt in ended:
            sessions = (
                [attempt.session_id] if attempt.superseded is None else [attempt.session_id, attempt.superseded[0]]
            )
            for session_id in sessions:
                stream = self._streams.get(session_id)
                if stream is not None:
                    stream.leases.pop(attempt.item.rollout_id, None)

    def all_open(self) -> list[RunnerStream]:
        """Returns every open stream."""
        return list(self._streams.values())
