"""What a call must pass before it runs, and what it gives back when it is over."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen.errors import Unavailable
from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import TokenCounts
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.meter import Meter
from fulmen_llm_proxy.capture.queue import CaptureQueue
from fulmen_llm_proxy.limits.limiter import Reservation
from fulmen_llm_proxy.routing.table import Backend, Target
from fulmen_llm_proxy.routing.table_holder import TableHolder


@dataclass(slots=True)
class Permit:
    """A call that was let in; to be closed exactly once, however the call ends."""

    gate: Gate
    caller: Caller
    request: CallRequest
    reservation: Reservation | None
    at_backends: dict[str, Reservation] | None = None

    def enter(self, backend: Backend) -> None:
        """Lets tries of the call go to a backend, where it counts once, however often it is tried or waits there.

        Raises:
            ModelLimitExceeded: if a limit of the backend leaves no room.
        """
        if not (backend.requests_per_minute or backend.tokens_per_minute):
            return
        if self.at_backends is None:
            self.at_backends = {}
        if backend.id not in self.at_backends:
            self.at_backends[backend.id] = self.gate.meter.enter(backend, self.request)

    def close(
        self, counts: TokenCounts | None, *, collected: Collected | None, target: Target | None, failed: bool
    ) -> TokenCounts:
        """Gives the call's place back, counts what it used, and returns that.

        Args:
            counts: its tokens, as the backend says; None if it does not.
            collected: what the answer brought; None if none came.
            target: where it went; None if nowhere.
            failed: it was not answered, or with an error.
        """
        self.gate.in_flight -= 1
        return self.gate.meter.close(
            self.caller,
            self.request,
            self.reservation,
            self.at_backends,
            counts=counts,
            collected=collected,
            target=target,
            failed=failed,
        )


class Gate:
    """Lets calls in while there is room for them."""

    def __init__(
        self, *, tables: TableHolder, queue: CaptureQueue, guard: AttemptGuard, meter: Meter, max_in_flight: int
    ) -> None:
        """Takes the bound of calls in flight in this process; beyond it calls are refused with 429."""
        self._tables = tables
        self._queue = queue
        self._guard = guard
        self._max_in_flight = max_in_flight
        self.meter = meter
        self.in_flight = 0

    def admit(self, caller: Caller, request: CallRequest) -> Permit:
        """Lets a call in.

        Raises:
            AttemptOver: if the caller's attempt is over.
            ModelLimitExceeded: if a limit of its project or attempt leaves no room.
            TokenBudgetExceeded: if its attempt has used its budget.
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
        reservation = self.meter.admit(caller, request)
        self.in_flight += 1
        return Permit(self, caller, request, reservation)
