"""Limits of a project's calls: rate, concurrency and bytes, so that no tenant slows down another.

A project has a token bucket and two counts of open calls, of whole answers and of streams. A call or message costs one
unit, and one more per 64 KiB sent or received. A call beyond a limit is refused, a stream beyond the rate is slowed down
by flow control. Calls within the limits begin in turns. Invariant: only a project's own calls count against it. Not
thread-safe: use it on one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from opentelemetry import metrics

from fulmen.errors import QuotaExceeded
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.security.fair_turns import FairTurns, Timed
from fulmen_service_kit.security.refusals import Refusals
from fulmen_service_kit.security.tokens import Caller

if TYPE_CHECKING:
    from fulmen_service_kit.settings import ServiceSettings

MAX_PROJECTS: Final = 10_000
BYTES_PER_UNIT: Final = 64 * 1024
PACE_LIMIT_S: Final = 2.0
"""Maximum delay of one message of a stream: less than what keeps sessions and connections alive."""
CALL_S: Final = 0.0003
"""Time of the event loop that a call takes outside its handler: its headers, its body, its answer."""
_OPEN_RETRY_S: Final = 0.5
_EVICTION_TRIES: Final = 16

ResultT = TypeVar("ResultT")


class ProjectShare:
    """One project's open calls, and what is left of its rate. As a context manager: one open call."""

    __slots__ = ("_limits", "_project", "_since_s", "calls", "left", "streams")

    def __init__(self, limits: ProjectLimits, project: str) -> None:
        self._limits = limits
        self._project = project
        self._since_s = limits.clock()
        self.left = limits.burst
        self.calls = self.streams = 0

    def refill(self) -> None:
        """Adds what has accrued since the last time."""
        now_s = self._limits.clock()
        self.left = min(self._limits.burst, self.left + (now_s - self._since_s) * self._limits.rate_per_s)
        self._since_s = now_s

    def charge(self, size_bytes: int, *, messages: int = 0) -> None:
        """Takes units for messages and bytes, which may leave a debt."""
        self.left -= messages + size_bytes / BYTES_PER_UNIT

    def spend(self, seconds: float) -> None:
        """Charges the project for time of the event loop."""
        self._limits.turns.spend(self._project, seconds)

    def timed(self, work: Awaitable[ResultT]) -> Awaitable[ResultT]:
        """Returns an awaitable that charges the project for the steps of another."""
        return work if self._limits.turns.is_quiet else Timed(work, self.spend)

    async def pace(self) -> None:
        """Waits before a message of a stream: for its turn, and until the debt is paid, at most `PACE_LIMIT_S`."""
        await self._limits.turns.wait(self._project)
        if self.left < 0:
            self.refill()
            if self.left < 0:
                await asyncio.sleep(min(-self.left / self._limits.rate_per_s, PACE_LIMIT_S))

    def end(self, *, is_stream: bool = False) -> None:
        """Ends an open call."""
        if is_stream:
            self.streams -= 1
        else:
            self.calls -= 1

    def __enter__(self) -> ProjectShare:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Unlimited(ProjectShare):
    """The share of callers that are not limited."""

    __slots__ = ()

    def charge(self, size_bytes: int, *, messages: int = 0) -> None:
        pass

    async def pace(self) -> None:
        pass

    def spend(self, seconds: float) -> None:
        pass

    def timed(self, work: Awaitable[ResultT]) -> Awaitable[ResultT]:
        return work

    def end(self, *, is_stream: bool = False) -> None:
        pass


class ProjectLimits:
    """The shares of all projects that have called recently."""

    def __init__(
        self,
        *,
        calls_per_s: float = 0.0,
        burst: float = 1.0,
        max_calls: int = 0,
        max_streams: int = 0,
        clock: Callable[[], float] = time.monotonic,
        max_projects: int = MAX_PROJECTS,
    ) -> None:
        """Initializes an empty table. A limit of 0 is none.

        Args:
            calls_per_s: Units per second of each project.
            burst: Units that it may use without a wait.
            max_calls: Its open calls, without streams.
            max_streams: Its open streams.
            clock: Monotonic clock, in seconds.
            max_projects: Size of the table; the project that called least recently and has no open call is dropped first.
        """
        self.clock = clock
        self.rate_per_s = calls_per_s
        # Without a rate, the balance stays infinite whatever is taken from it.
        self.burst = burst if calls_per_s else math.inf
        self._max_calls = max_calls or math.inf
        self._max_streams = max_streams or math.inf
        self._max_projects = max_projects
        self._shares: OrderedDict[str, ProjectShare] = OrderedDict()
        self._unlimited = _Unlimited(self, ALL_PROJECTS)
        self.turns = FairTurns()
        self.refusals = Refusals()
        self._refused = metrics.get_meter("fulmen.limits").create_counter(
            "fulmen.project.calls.refused", description="Calls refused by a limit of their project."
        )
        for limit in ("rate", "calls", "streams"):
            self._refused.add(0, {"limit": limit})

    @classmethod
    def configured(cls, settings: ServiceSettings) -> ProjectLimits:
        """Returns the limits in the settings of a service."""
        return cls(
            calls_per_s=settings.project_calls_per_s,
            burst=settings.project_burst,
            max_calls=settings.project_max_calls,
            max_streams=settings.project_max_streams,
        )

    async def admit(self, caller: Caller, *, is_stream: bool = False, is_counted: bool = True) -> ProjectShare:
        """Counts a call that begins, and waits for its turn; the caller calls `end` of the share that is returned.

        Args:
            caller: The caller. Tokens for all projects, which services have, are not limited.
            is_stream: Whether it is a stream.
            is_counted: Whether the rpc is limited at all.

        Raises:
            QuotaExceeded: If a limit of the caller's project is exhausted.
        """
        if not is_counted or caller.project == ALL_PROJECTS:
            return self._unlimited
        share = self._share(caller.project)
        share.refill()
        if (share.streams >= self._max_streams) if is_stream else (share.calls >= self._max_calls):
            await self._refuse(caller.project, "streams" if is_stream else "calls", _OPEN_RETRY_S)
        if share.left < 1:
            await self._refuse(caller.project, "rate", (1 - share.left) / self.rate_per_s)
        share.left -= 1
        if is_stream:
            share.streams += 1
        else:
            share.calls += 1
        try:
            await self.turns.wait(caller.project)
        except asyncio.CancelledError:
            share.end(is_stream=is_stream)
            raise
        share.spend(CALL_S)
        return share

    def _share(self, project: str) -> ProjectShare:
        share = self._shares.get(project)
        if share is not None:
            self._shares.move_to_end(project)
            return share
        share = self._shares[project] = ProjectShare(self, project)
        if len(self._shares) > self._max_projects:
            for name, idle in islice(self._shares.items(), _EVICTION_TRIES):
                if idle is not share and not idle.calls and not idle.streams:
                    del self._shares[name]
                    break
        return share

    async def _refuse(self, project: str, limit: str, wait_s: float) -> None:
        self._refused.add(1, {"limit": limit})
        await self.refusals.hold(project)
        text = {
            "rate": f"{self.rate_per_s:g} calls per second, in units of a message and 64 KiB (project_calls_per_s)",
            "calls": f"{self._max_calls} calls at the same time (project_max_calls)",
            "streams": f"{self._max_streams} open streams (project_max_streams)",
        }[limit]
        raise QuotaExceeded(
            f"{project} has reached its limit of {text}. Retry after the delay; an operator can raise the limit.",
            retry_after_s=max(wait_s, _OPEN_RETRY_S / 5),
            project=project,
            quota=f"project_{limit}",
        )
