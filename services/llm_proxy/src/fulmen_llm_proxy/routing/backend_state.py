"""The state of each backend as this process sees it: slots in use, failures, load of its engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fulmen_llm_proxy.routing.breaker import Breaker, BreakerState
from fulmen_llm_proxy.routing.retry import RetryBudget
from fulmen_llm_proxy.routing.seats import Row, Seats

UNKNOWN = -1
_SATURATED_WAITING = 16
_SATURATED_CACHE = 0.95
_BUSY = 4
"""Calls in flight that keep an engine computing even if each prompt must be computed anew, as that takes about a quarter of
a call."""


class QueueFull(Exception):
    """The queue of a backend is full."""


@dataclass(slots=True, eq=False, kw_only=True)
class BackendState:
    """Counts of one backend; `acquire` and `release` bound the calls in flight.

    Attributes:
        in_flight: calls in flight.
        load: calls in flight or waiting for a slot.
        held: calls waiting for the end of a hold.
        last_failure_s: time of the last failure, seconds since 1970; None if never.
        last_failure_kind: kind of the last failure; empty if never.
        engine_waiting: requests waiting inside the engine; UNKNOWN if not reported.
        engine_cache_usage: share of its key-value cache in use; 0 to 1; UNKNOWN if not reported.
        is_saturated: whether another call would only wait in the engine, or evict the cache of others.
        row: the attempts that are seated at it.
    """

    wall_clock: Callable[[], float]
    breaker: Breaker
    budget: RetryBudget
    row: Row
    in_flight: int = 0
    load: int = 0
    held: int = 0
    requests: int = 0
    failures: int = 0
    last_failure_s: float | None = None
    last_failure_kind: str = ""
    engine_waiting: int = UNKNOWN
    engine_cache_usage: float = UNKNOWN
    is_saturated: bool = False
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Number of calls waiting for a slot, for the end of a hold, or for their attempt's turn."""
        return len(self._waiting) + self.held + self.row.waiting

    def set_engine_load(self, waiting: int, cache_use: float) -> None:
        """Sets the load that the engine reports; UNKNOWN for values that it does not report."""
        self.engine_waiting, self.engine_cache_usage = waiting, cache_use
        self.is_saturated = waiting >= _SATURATED_WAITING or cache_use >= _SATURATED_CACHE

    def try_acquire(self, limit: int) -> bool:
        """Acquires a slot if one of `limit` is free and no call waits for it."""
        if self.in_flight < limit and not self._waiting:
            self.in_flight += 1
            self.load += 1
            return True
        return False

    async def acquire(self, limit: int, *, max_waiting: int) -> bool:
        """Acquires a slot; waits in FIFO order while `limit` slots are in use. The caller sets the deadline.

        Returns:
            Whether it had to wait.

        Raises:
            QueueFull: if `max_waiting` calls are already waiting.
        """
        if self.try_acquire(limit):
            return False
        if len(self._waiting) >= max_waiting:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.load += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was just passed on
            else:
                self._waiting.remove(turn)
                self.load -= 1
            raise
        return True

    def release(self) -> None:
        """Releases a slot to the call that has waited longest."""
        self.load -= 1
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.in_flight -= 1
        self.wake_next()

    @property
    def is_busy(self) -> bool:
        """Whether calls enough are in flight to keep an engine computing."""
        return self.in_flight >= _BUSY

    def wake_next(self) -> None:
        """Lets attempts whose turn has not come continue while the engine is not busy."""
        if not self.is_busy:
            self.row.wake_next(_BUSY - self.in_flight)

    def begin(self) -> int:
        """Counts a call that is sent; returns the breaker's period."""
        self.requests += 1
        return self.breaker.begin()

    def answered(self, period: int) -> None:
        """Counts an answer that shows the backend is healthy."""
        if self.breaker.succeeded(period):
            self.budget.release()

    def failed(self, period: int, kind: str) -> None:
        """Counts a failure caused by the backend."""
        self.failures += 1
        self.note_failure(kind)
        self.breaker.failed(period)

    def note_failure(self, kind: str) -> None:
        """Notes the last failure, of a call or of what serves it."""
        self.last_failure_s = self.wall_clock()
        self.last_failure_kind = kind


class BackendStates:
    """The states of all backends that were called, by backend id, and the seats of attempts at them.

    Attributes:
        seats: the seats of all attempts.
    """

    def __init__(self, *, recheck_s: float, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """Creates an empty collection.

        Args:
            recheck_s: seconds after which a backend with an open breaker is tried again, if its health is not probed.
            clock: monotonic clock, seconds.
            wall_clock: system clock, seconds since 1970.
        """
        self._recheck_s = recheck_s
        self._clock = clock
        self.wall_clock = wall_clock
        self.seats = Seats(clock=clock)
        self._states: dict[str, BackendState] = {}

    def of(self, backend_id: str) -> BackendState:
        """Returns the state of a backend; creates it on first use."""
        state = self._states.get(backend_id)
        if state is None:
            state = self._states[backend_id] = BackendState(
                wall_clock=self.wall_clock,
                breaker=Breaker(clock=self._clock, recheck_s=self._recheck_s),
                budget=RetryBudget(clock=self._clock),
                row=Row(backend_id),
            )
        return state

    def is_healthy(self, backend_id: str) -> bool:
        """Returns whether the backend's breaker is not open."""
        return self.of(backend_id).breaker.state is not BreakerState.OPEN

    def items(self) -> Iterator[tuple[str, BackendState]]:
        """Yields backend ids and states."""
        return iter(list(self._states.items()))

    def keep_only(self, backend_ids: Iterable[str]) -> None:
        """Drops the states of removed backends that have no calls; all calls that wait are routed again."""
        kept = set(backend_ids)
        for backend_id, state in list(self._states.items()):
            state.row.wake_all()
            if backend_id not in kept and state.load == 0:
                del self._states[backend_id]

    def sweep(self) -> None:
        """Gives up unused seats; calls that wait at a backend with an open breaker are routed again."""
        self.seats.sweep()
        for state in self._states.values():
            if not state.breaker.admits:
                state.row.wake_all()
            state.wake_next()
