"""Drains a runner without losing an attempt."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from fulmen_runner.attempts.pool import AttemptPool, StopReason

RELEASE_RESERVE_S = 4.0
"""Part of the grace period reserved for stopping agents and releasing their leases; at most a third of it."""

_log = structlog.get_logger()


class Drain:
    """Stops accepting assignments, waits for running attempts, and releases those that do not finish.

    Invariant: a runner drains once; further requests wait for the same drain.
    """

    def __init__(self, *, pool: AttemptPool, release_session: Callable[[], Awaitable[None]], grace_s: float) -> None:
        self._pool = pool
        self._release_session = release_session
        self._grace_s = grace_s
        self._finish_by = float("inf")
        self._started: asyncio.Task[None] | None = None
        self.requested = asyncio.Event()

    def begin(self) -> None:
        """Stops accepting assignments; running attempts continue."""
        self._pool.session.draining = True
        self._pool.changed.set()

    async def finish(self) -> None:
        """Waits for running attempts within the grace period, then stops and releases the rest."""
        self.begin()
        deadline = time.monotonic() + self._grace_s
        reserve_s = min(RELEASE_RESERVE_S, self._grace_s / 3)
        if not await self._pool.wait_idle(self._grace_s - reserve_s):
            _log.warning("attempts_released", count=len(self._pool.session.running))
            await self._pool.stop_all(StopReason.RELEASED)
        await self._wait_acknowledged(deadline - reserve_s / 3)
        await self._release_session()

    def start(self, grace_s: float | None = None) -> None:
        """Begins a drain that requests a stop once no attempt runs or the grace is over, `grace_s` seconds; None for the setting's."""
        self.begin()
        if self._started is None:
            wait_s = self._grace_s if grace_s is None else grace_s
            self._started = asyncio.create_task(self._wait_then_request(wait_s), name="drain")

    async def _wait_then_request(self, grace_s: float) -> None:
        await self._pool.wait_idle(grace_s)
        self.requested.set()

    async def _wait_acknowledged(self, deadline: float) -> None:
        """Waits until the store has acknowledged every report, or the deadline (monotonic seconds)."""
        while self._pool.session.unacknowledged_count and (left := deadline - time.monotonic()) > 0:
            acknowledged = asyncio.create_task(self._pool.acknowledged.wait())
            self._pool.acknowledged.clear()
            await asyncio.wait((acknowledged,), timeout=left)
            acknowledged.cancel()
