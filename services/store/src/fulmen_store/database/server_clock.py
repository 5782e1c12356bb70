"""PostgreSQL's clock, and when it was set.

Leases, timeouts and delays are moments of this clock. One that is set ahead ends them early: who ends something because its
time is over looks at the clock first, and leaves it be for a while if the clock was set. One that is set back prolongs
them: `leases.clock_mender` shortens what was written while it was ahead.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

import structlog

from fulmen_service_kit.security.revocation import FollowedClock

__all__ = ["LATE_S", "STEP_S", "ServerClock"]

STEP_S: Final = 5.0
"""Differences up to this are not a step: every wait that this clock decides may be longer by as much."""

LATE_S: Final = 30.0
"""Differences up to this between the clock and what a statement expects of it may be its wait for a connection."""

_log = structlog.get_logger()


class ServerClock(FollowedClock):
    """Follows PostgreSQL's clock; all replicas follow the same.

    Attributes:
        was_set: Set whenever the clock was set.
        ahead_from_s: What it showed when it was last set ahead, Unix seconds; 0 if it never was.
        ahead_by_s: By how much it was, seconds.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(wall=wall, monotonic=monotonic)
        self._now = monotonic
        self._was_seen = False
        self._set_at_s = -math.inf
        self.was_set = asyncio.Event()
        self.ahead_from_s = self.ahead_by_s = 0.0

    def observe(self, there_s: float, *, took_s: float) -> float:
        """Notes PostgreSQL's time; see `FollowedClock.observe`."""
        step_s = super().observe(there_s, took_s=took_s)
        was_seen, self._was_seen = self._was_seen, True
        if not was_seen or abs(step_s) <= STEP_S + took_s:
            return step_s
        _log.warning("database_clock_was_set", by_s=round(step_s, 1))
        self._set_at_s = self._now()
        self.was_set.set()
        if step_s > 0:
            self.ahead_from_s, self.ahead_by_s = there_s - step_s, step_s
        return step_s

    def has_run_for(self, seconds: float) -> bool:
        """Returns whether it was not set for so long, as far as this process has seen."""
        return self._now() - self._set_at_s >= seconds
