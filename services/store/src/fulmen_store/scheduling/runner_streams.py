"""Where runners sit while they wait for work: their credit, and what is to be told to them.

Invariant: a stream is never given more assignments than it has granted credits, so its outbox is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from fulmen.errors import FulmenError
from fulmen_store.leases.leases import CompletionStatus, Grant
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
    "RunnerStream",
    "RunnerStreams",
    "StreamClosed",
]

MAX_CREDIT: Final = 10_000
# How many streams are looked at for one that ran the like of a new item last.
AFFINITY_WINDOW: Final = 16
MAX_MERGED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Work for the runner."""

    grants: Sequence[Grant]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Attempts, as (rollout, epoch), that the runner is asked to stop."""

    attempts: Sequence[tuple[UUID, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesLost:
    """Attempts, as (rollout, epoch), that the runner no longer holds."""

    attempts: Sequence[tuple[UUID, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The replica is going down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """The session is over, or its stream was opened elsewhere."""


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class Acknowledgement:
    """The answer to one report or release."""

    attempt: str
    status: CompletionStatus
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """Answers for the runner, after their commit."""

    answers: Sequence[Acknowledgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDone:
    """The runner closed its side, or did something that ends the stream."""

    error: FulmenError | None = None


_NoticeT = TypeVar("_NoticeT", Assigned, Acknowledged)
Notice = Acknowledged | RunnerDone | Assigned | CancelRequested | LeasesLost | Drained | StreamClosed


class Outbox:
    """Notices for one runner, in order; assignments and answers that wait together go out together."""

    def __init__(self) -> None:
        self._waiting: deque[Notice] = deque()
        self._arrived = asyncio.Event()

    def put(self, notice: Notice) -> None:
        """Adds a notice."""
        self._waiting.append(notice)
        self._arrived.set()

    async def wait(self) -> None:
        """Returns when there is a notice."""
        await self._arrived.wait()

    def take(self) -> Notice | None:
        """Takes the next notice, one with those that follow and are alike; None if there is none."""
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
    """One runner session's place at this replica.

    Attributes:
        session_id: the session.
        labels: `key=value` strings that the runner has.
        projects: the projects that it serves; None means all.
        credit: how many more assignments it takes now.
        outbox: what is to be sent to it, in order.
        last_group: the group of what it was given last.
        last_agent: the agent's version of what it was given last.
    """

    session_id: UUID
    labels: frozenset[str]
    projects: frozenset[int] | None
    credit: int = 0
    closed: bool = False
    outbox: Outbox = field(default_factory=lambda: Outbox())
    leases: dict[UUID, int] = field(default_factory=dict)
    last_group: UUID | None = None
    last_agent: int | None = None

    def qualifies(self, item: ReadyItem, *, match_labels: bool = True) -> bool:
        """Tells whether the runner may run an item; without `match_labels` whatever its labels are."""
        if self.projects is not None and item.project_id not in self.projects:
            return False
        return not match_labels or item.labels <= self.labels

    def give(self, item: ReadyItem) -> None:
        """Uses a credit for an item."""
        self.credit -= 1
        self.last_group, self.last_agent = item.group_key, item.agent

    def refund(self) -> None:
        """Gives a credit back that came to nothing."""
        if not self.closed:
            self.credit += 1

    def affinity(self, item: ReadyItem) -> int:
        """Returns 2 if it was given an item of the same group last, 1 if one of the same agent version, else 0."""
        if item.group_key is not None and item.group_key == self.last_group:
            return 2
        return int(item.agent is not None and item.agent == self.last_agent)

    def tell(self, notice: Notice) -> None:
        """Queues a notice for the runner."""
        self.outbox.put(notice)


class RunnerStreams:
    """All streams of this replica, by session, and the turn order in which they are served."""

    def __init__(self) -> None:
        self._streams: dict[UUID, RunnerStream] = {}
        self._turns: deque[RunnerStream] = deque()
        self._active: set[UUID] = set()

    def __len__(self) -> int:
        """Counts the open streams."""
        return len(self._streams)

    def take(self, stream: RunnerStream) -> None:
        """Opens a stream; an older stream of the same session is closed."""
        older = self._streams.get(stream.session_id)
        if older is not None:
            self.leave(older)
            older.tell(StreamClosed())
        self._streams[stream.session_id] = stream
        self._turns.append(stream)

    def leave(self, stream: RunnerStream) -> None:
        """Closes a stream; its credit is void."""
        stream.closed = True
        stream.credit = 0
        if self._streams.get(stream.session_id) is stream:
            del self._streams[stream.session_id]

    def find(self, session_id: UUID) -> RunnerStream | None:
        """Returns the open stream of a session."""
        return self._streams.get(session_id)

    def with_credit(self) -> list[RunnerStream]:
        """Returns the streams that take work, in turn order, and moves the turn on by one."""
        while self._turns and self._turns[0].closed:
            self._turns.popleft()
        if len(self._turns) > 2 * len(self._streams) + 16:
            self._turns = deque(stream for stream in self._turns if not stream.closed)
        waiting = [stream for stream in self._turns if stream.credit > 0]
        self._turns.rotate(-1)
        return waiting

    def next_for(
        self, item: ReadyItem, rules: QueueRules = DEFAULT_RULES, *, besides: UUID | None = None
    ) -> RunnerStream | None:
        """Returns the stream that gets an item, of those that take work and qualify.

        It is the one whose turn it is, unless one of those behind it ran the item's group, or its agent, last; never
        that of the session `besides`.
        """
        passed: list[RunnerStream] = []
        found, affinity = None, -1
        for _ in range(len(self._turns)):
            stream = self._turns.popleft()
            if stream.closed:
                continue
            able = stream.credit > 0 and stream.session_id != besides
            if not able or not stream.qualifies(item, match_labels=rules.match_labels):
                self._turns.append(stream)
                continue
            passed.append(stream)
            own = stream.affinity(item)
            if own > affinity:
                found, affinity = stream, own
            if not rules.affinity or affinity >= item.max_affinity or len(passed) >= AFFINITY_WINDOW:
                break
        # Who was passed over keeps its turn.
        self._turns.extendleft(stream for stream in reversed(passed) if stream is not found)
        if found is not None:
            self._turns.append(found)
        return found

    def open_credit(self, project_id: int | None = None) -> int:
        """Sums the unused credit, or that which may be used for one project."""
        return sum(
            stream.credit
            for stream in self._streams.values()
            if project_id is None or stream.projects is None or project_id in stream.projects
        )

    def mark_active(self, session_id: UUID) -> None:
        """Notes a sign of life; the renewer writes it down."""
        self._active.add(session_id)

    def drain_active(self) -> set[UUID]:
        """Returns the sessions mark_active since the last call."""
        mark_active, self._active = self._active, set()
        return mark_active

    def send_each(self, notices: Iterable[tuple[UUID, Notice]]) -> None:
        """Passes notices on to those sessions that sit here."""
        for session_id, notice in notices:
            stream = self._streams.get(session_id)
            if stream is not None:
                stream.tell(notice)

    def lease_over(self, session_id: UUID, rollout_id: UUID) -> None:
        """Forgets a lease that has ended."""
        stream = self._streams.get(session_id)
        if stream is not None:
            stream.leases.pop(rollout_id, None)

    def all_open(self) -> list[RunnerStream]:
        """Returns every open stream."""
        return list(self._streams.values())
