"""Admits calls, and releases their resources at their end."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen.errors import Unavailable
from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import TokenCounts, used
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.meter import Meter
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.limits.limiter import Reservation
from fulmen_llm_proxy.routing.table import Backend, Target
from fulmen_llm_proxy.routing.table_holder import TableHolder


@dataclass(slots=True)
class Permit:
    """The admission of a call; to be closed exactly once, however the call ends."""

    gate: Gate
    caller: Caller
    request: CallRequest
    reservation: Reservation | None
    at_backends: dict[str, Reservation] | None = None

    def enter(self, backend: Backend) -> None:
        """Admits the call to a backend, where it counts once, however many tries it makes there.

        Raises:
            ModelLimitExceeded: if a limit of the backend is exhausted.
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
        """Releases the call's slot and reservations, counts its usage, and returns it; an estimate if none is reported.

        Args:
            counts: token counts reported by the backend; None if it reported none.
            collected: slices of the answer; None without an answer.
            target: target of the latest try; None if there was none.
            failed: whether the call ended without an answer or with an error.
        """
        gate = self.gate
        gate.in_flight -= 1
        known = used(self.request, counts, collected)
        tokens = (known.prompt or 0) + (known.completion or 0)
        gate.meter.settle(self.reservation, self.at_backends, target=target, tokens=tokens)
        gate.meter.count(self.caller, self.request, known, target=target, failed=failed)
        return known


class Gate:
    """Admits calls while there is capacity."""

    def __init__(
        self, *, tables: TableHolder, queue: CaptureQueue, guard: AttemptGuard, meter: Meter, max_in_flight: int
    ) -> None:
        """Sets the checks.

        Args:
            max_in_flight: maximum number of calls in flight in this process; further calls get 429.
        """
        self._tables = tables
        self._queue = queue
        self._guard = guard
        self._max_in_flight = max_in_flight
        self.meter = meter
        self.in_flight = 0

    def admit(self, caller: Caller, request: CallRequest) -> Permit:
        """Admits a call.

        Raises:
            AttemptOver: if the caller's attempt has ended.
            ModelLimitExceeded: if a limit of its project or attempt is exhausted.
            TokenBudgetExceeded: if its attempt has used up its token budget.
            Refused: if the process has reached its maximum of calls in flight.
            Unavailable: until the routes are loaded, or while the capture buffer is full; retryable.
        """
        if caller.attribution is not None:
            self._guard.require(caller.attribution)
        self._tables.require_loaded()
        if self.in_flight >= self._max_in_flight:
            raise Refused(429, "too_many_calls", "The proxy has reached its maximum of calls in flight.")
        if caller.attribution is not None and self._queue.is_full:
            raise Unavailable("The capture buffer is full and the store is unavailable.")
        reservation = self.meter.admit(caller, request)
        self.in_flight += 1
        return Permit(self, caller, request, reservation)
