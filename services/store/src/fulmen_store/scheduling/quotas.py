"""A project's quotas of running and waiting rollouts.

Invariant: never more than `max_running` rollouts run, whatever the number of replicas; the claim counts under the
project's lock. `max_queued` bounds a producer's backlog: it is compared with a recent count plus the rollouts that this
replica created since, so no request has to count the backlog.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fulmen.errors import QuotaExceeded
from fulmen_store.budgets import UsedUpBudgets
from fulmen_store.clock import Clock
from fulmen_store.leases.leases import Grant, LeaseTable
from fulmen_store.scheduling.fair_queue import FairQueue
from fulmen_store.scheduling.matching import Choice
from fulmen_store.scheduling.table import QueueCount, QueueStatsTable

__all__ = [
    "QueueQuotas",
    "RunningQuotas",
]

COUNT_TTL_S: Final = 1.0
# A refusal needs a more recent count, so that a producer can continue soon after its queue has room.
REFUSAL_TTL_S: Final = 0.1
# Bounds counting of a long backlog to a twentieth of a connection's time.
COUNT_TTL_PER_COST: Final = 20.0
# Claims that a project may try while the room left by other replicas is unknown.
PROBE: Final = 16


class RunningQuotas:
    """Claims the queue's choices within the quotas of their projects."""

    def __init__(self, table: LeaseTable, ready: FairQueue) -> None:
        self._table = table
        self._ready = ready

    async def claim(self, choices: Sequence[Choice]) -> list[Grant]:
        """Claims choices; items refused by a quota return to the queue.

        Raises:
            DatabaseUnavailable: If the outcome is unknown.
        """
        free: list[Choice] = []
        limited: dict[int, list[Choice]] = {}
        for choice in choices:
            project_id = choice[0].project_id
            if self._ready.terms_of(project_id).max_running is None:
                free.append(choice)
            else:
                limited.setdefault(project_id, []).append(choice)
        grants = (
            await self._table.claim([(item.rollout_id, stream.session_id) for item, stream in free]) if free else []
        )
        for project_id, wanted in limited.items():
            tried, granted, room = await self._claim_within(project_id, wanted)
            grants += granted
            for item, _ in wanted[tried:]:
                self._ready.push(item)
            self._ready.allow(project_id, room)
        return grants

    async def _claim_within(self, project_id: int, wanted: Sequence[Choice]) -> tuple[int, list[Grant], int]:
        pairs = [(item.rollout_id, stream.session_id) for item, stream in wanted]
        claim = await self._table.claim_within(project_id, pairs)
        return claim.tried, claim.grants, claim.room

    def ended(self, projects: Iterable[int]) -> bool:
        """Records ended attempts, one project per attempt; returns whether any of the projects has a quota."""
        return sum(self._ready.allow_more(project_id, count) for project_id, count in Counter(projects).items()) > 0

    def probe_again(self) -> None:
        """Allows a few claims to each project without room, since other replicas may have made some."""
        self._ready.allow_at_least(PROBE)


@dataclass(slots=True)
class _Known:
    """The last count, and the number of rollouts that this replica admitted since."""

    count: QueueCount = field(default_factory=lambda: QueueCount(max_queued=None, queued=0))
    added: int = 0
    stale_at: float = -math.inf
    doubtful_at: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def has_room(self, count: int) -> bool:
        most = self.count.max_queued
        return most is None or self.count.queued + self.added + count <= most


class QueueQuotas:
    """Limits the number of waiting rollouts."""

    def __init__(
        self, table: QueueStatsTable, *, used_up: UsedUpBudgets | None = None, clock: Clock | None = None
    ) -> None:
        """Creates the limits; `used_up` are the budgets that allow no more rollouts."""
        self._table = table
        self.used_up = used_up or UsedUpBudgets()
        self._clock = (clock or Clock()).monotonic_s
        self._known: dict[int, _Known] = {}

    async def admit(self, projects: Iterable[int]) -> None:
        """Admits new rollouts, one project per rollout, all or none.

        Raises:
            QuotaExceeded: If a project's quota of waiting rollouts is exceeded.
            DatabaseUnavailable: If they cannot be counted.
        """
        wanted = Counter(projects)
        for project_id, count in wanted.items():
            await self._count_if_needed(self._known.setdefault(project_id, _Known()), project_id, count)
        # No await from here on, so check and update are atomic.
        for project_id, count in wanted.items():
            self._check(self._known[project_id], count)
        for project_id, count in wanted.items():
            self._known[project_id].added += count

    async def _count_if_needed(self, known: _Known, project_id: int, count: int) -> None:
        async with known.lock:
            now = self._clock()
            if now >= known.stale_at or (now >= known.doubtful_at and not known.has_room(count)):
                # Rollouts admitted during the count may or may not be in it; add them to be safe.
                before = known.added
                known.count = await self._table.queued(project_id)
                known.added -= before
                cost_s = self._clock() - now
                known.stale_at = self._clock() + max(COUNT_TTL_S, COUNT_TTL_PER_COST * cost_s)
                known.doubtful_at = self._clock() + max(REFUSAL_TTL_S, COUNT_TTL_PER_COST * cost_s)

    def _check(self, known: _Known, count: int) -> None:
        if known.has_room(count):
            return
        raise QuotaExceeded(
            "The project's quota of waiting rollouts is exceeded.",
            retry_after_s=max(0.0, known.stale_at - self._clock()),
            max_queued=known.count.max_queued,
            queued=known.count.queued + known.added,
            asked=count,
        )
