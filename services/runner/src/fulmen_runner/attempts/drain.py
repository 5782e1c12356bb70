"""Ends a runner without losing an attempt."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from fulmen_runner.attempts.pool import AttemptPool, StopReason

RELEASE_RESERVE_S = 4.0
"""How much of the grace is kept for stopping agents and giving their leases back; at most a third of it."""

_log = structlog.get_logger()


class Drain:
    """Stops taking work, lets what runs finish, gives back the rest.

    Invariant: it happens once; who asks again waits for the same.
    """

    def __init__(self, *, pool: AttemptPool, release_session: Callable[[], Awaitable[None]], grace_s: float) -> None:
        self._pool = pool
        self._release_session = release_session
        self._grace_s = grace_s
        self._finish_by = float("inf")
        self.requested = asyncio.Event()

    @property
    def default_grace_s(self) -> float:
        """The grace of the settings, in seconds."""
        return self._grace_s

    def begin(self) -> None:
        """Stops taking work; what runs goes on."""
        self._pool.session.draining = True
        self._pool.changed.set()

    async def finish(self) -> None:
        """Waits for what runs, within the grace; then stops it, and reports or releases everything."""
        self.begin()
        deadline = time.monotonic() + self._grace_s
        reserve_s = min(RELEASE_RESERVE_S, self._grace_s / 3)
        if not await self._pool.wait_idle(self._grace_s - reserve_s):
            _log.warning("attempts_released", count=len(self._pool.session.running))
            await self._pool.stop_all(StopReason.RELEASED)
        await self._reported(deadline - reserve_s / 3)
        await self._release_session()

    async def wait_then_request(self, grace_s: float) -> None:
        """For the Drain rpc: lets what runs go on for up to `grace_s`, then asks the service to stop."""
        self.begin()
        await self._pool.wait_idle(grace_s)
        self.requested.set()

    async def _reported(self, deadline: float) -> None:
        """Waits until the store has acknowledged every report, or the deadline (monotonic seconds)."""
        while self._pool.session.unacknowledged_count and (left := deadline - time.monotonic()) > 0:
            acknowledged = asyncio.create_task(self._pool.acknowledged.wait())
            self._pool.acknowledged.clear()
            await asyncio.wait((acknowledged,), timeout=left)
            acknowledged.cancel()
