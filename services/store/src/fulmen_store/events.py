"""Events of the queue. Use cases emit them, `app.py` subscribes.

Subscribers run synchronously, in the order of subscription, and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from uuid import UUID

from fulmen_store.leases.leases import AttemptReport, EndedAttempt
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.runner_streams import Notice

__all__ = ["Event", "QueueEvents"]

PayloadT = TypeVar("PayloadT")


class Event(Generic[PayloadT]):
    """Something that happens again and again."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[PayloadT], object]] = []

    def subscribe(self, subscriber: Callable[[PayloadT], object]) -> None:
        """Adds a function that is called with every payload."""
        self._subscribers.append(subscriber)

    def emit(self, payload: PayloadT) -> None:
        """Calls every subscriber."""
        for subscriber in self._subscribers:
            subscriber(payload)


@dataclass(frozen=True, slots=True)
class QueueEvents:
    """The events of one replica's queue.

    Attributes:
        attempts_ended: Attempts whose end was committed.
        leases_undelivered: Leases whose runner never received them, as RELEASED reports.
        projects_finished: Projects in which rollouts became final.
        work_ready: Committed rollouts that wait, each with the delay before it may run, seconds.
        work_unmatched: Projects with new work for which no runner here has credit.
        session_notices: Notices for runner sessions, whichever replica holds their streams.
    """

    attempts_ended: Event[Sequence[EndedAttempt]] = field(default_factory=lambda: Event())
    leases_undelivered: Event[Sequence[AttemptReport]] = field(default_factory=lambda: Event())
    projects_finished: Event[frozenset[int]] = field(default_factory=lambda: Event())
    work_ready: Event[Sequence[tuple[ReadyItem, float]]] = field(default_factory=lambda: Event())
    work_unmatched: Event[frozenset[int]] = field(default_factory=lambda: Event())
    session_notices: Event[Sequence[tuple[UUID, Notice]]] = field(default_factory=lambda: Event())
