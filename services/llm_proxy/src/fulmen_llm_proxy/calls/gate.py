"""What a call must pass before it runs, and what it gives back when it is over."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen.errors import Unavailable
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.domain.apis.api import CallRequest
from fulmen_llm_proxy.domain.attempt_guard import AttemptGuard
from fulmen_llm_proxy.domain.call import Caller
from fulmen_llm_proxy.domain.capture import TokenCounts
from fulmen_llm_proxy.domain.capture_queue import CaptureQueue
from fulmen_llm_proxy.domain.table import TableHolder


@dataclass(slots=True)
class Permit:
    """A call that was let in; to be closed exactly once, however the call ends."""

    gate: Gate

    def close(self, counts: TokenCounts | None) -> None:
        """Gives the call's place back.

        Args:
            counts: what the call used; None if no answer came.
        """
        self.gate.in_flight -= 1


class Gate:
    """Lets calls in while there is room for them."""

    def __init__(self, *, tables: TableHolder, queue: CaptureQueue, guard: AttemptGuard, max_in_flight: int) -> None:
        """Takes the bound of calls in flight in this process; beyond it calls are refused with 429."""
        self._tables = tables
        self._queue = queue
        self._guard = guard
        self._max_in_flight = max_in_flight
        self.in_flight = 0

    def admit(self, caller: Caller, request: CallRequest) -> Permit:
        """Lets a call in.

        Raises:
            AttemptOver: if the caller's attempt is over.
            Refused: if the process has as many calls as it may.
            Unavailable: while routes are not known yet, or captures have no room; the caller should come back.
        """
        if caller.attribution is not None:
            self._guard.require(caller.attribution)
        self._tables.require_loaded()
        if self.in_flight >= self._max_in_flight:
            raise Refused(429, "too_many_calls", "The proxy has as many calls in flight as it may.")
        if caller.attribution is not None and self._queue.is_full:
            raise Unavailable("The store is away and the proxy holds as many captures as it may.")
        self.in_flight += 1
        return Permit(self)
