"""How each backend does, as this process sees it: slots in use, recent failures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

FAILURES_UNTIL_UNHEALTHY = 3
"""Failures in a row after which a backend is passed over while the route has another."""


@dataclass(slots=True)
class BackendState:
    """Counts of one backend; `acquire` and `release` bound the calls in flight.

    Attributes:
        held: calls that wait for the end of a hold.
        last_failure_s: wall clock of the last failure, seconds since 1970; None: never.
    """

    in_flight: int = 0
    held: int = 0
    requests: int = 0
    failures: int = 0
    failures_in_row: int = 0
    last_failure_s: float | None = None
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot, or for the end of a hold."""
        return len(self._waiting) + self.held

    async def acquire(self, limit: int) -> bool:
        """Takes a slot; waits in turn while `limit` slots are in use. The caller gives the deadline.

        Returns:
            True if it had to wait.
        """
        if self.in_flight < limit and not self._waiting:
            self.in_flight += 1
            return False
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was handed over just before
            else:
                self._waiting.remove(turn)
            raise
        return True

    def release(self) -> None:
        """Gives a slot back, to the call that has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.in_flight -= 1


class BackendStates:
    """The states of all backends that were called, by backend id."""

    def __init__(self, *, recheck_s: float, wall_clock: Callable[[], float]) -> None:
        """Creates an empty set.

        Args:
            recheck_s: seconds after the last failure from which an unhealthy backend is tried again.
            wall_clock: seconds since 1970.
        """
        self._recheck_s = recheck_s
        self._wall_clock = wall_clock
        self._states: dict[str, BackendState] = {}

    def of(self, backend_id: str) -> BackendState:
        """Returns the state of a backend, new on first use."""
        state = self._states.get(backend_id)
        if state is None:
            state = self._states[backend_id] = BackendState()
        return state

    def is_healthy(self, backend_id: str) -> bool:
        """Tells whether calls should go there: few failures in a row, or time for another look."""
        state = self._states.get(backend_id)
        if state is None or state.failures_in_row < FAILURES_UNTIL_UNHEALTHY:
            return True
        return self._wall_clock() - (state.last_failure_s or 0.0) >= self._recheck_s

    def failed(self, backend_id: str) -> None:
        """Counts a call that the backend did not answer."""
        state = self.of(backend_id)
        state.failures += 1
        state.failures_in_row += 1
        state.last_failure_s = self._wall_clock()

    def answered(self, backend_id: str) -> None:
        """Counts a call that the backend answered, with whatever status but 503."""
        self.of(backend_id).failures_in_row = 0

    def keep_only(self, backend_ids: Iterable[str]) -> None:
        """Forgets backends that are gone and have no call in flight."""
        kept = set(backend_ids)
        for backend_id, state in list(self._states.items()):
            if backend_id not in kept and state.in_flight == 0:
                del self._states[backend_id]
