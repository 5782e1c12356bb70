"""Admits calls, and releases their resources at their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from fulmen.errors import Unavailable
from fulmen_llm_proxy.apis.api import CallRequest
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import TokenCounts, used
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard, AttemptTie
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.meter import Meter
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.limits.budgets import Budget
from fulmen_llm_proxy.limits.limiter import Reservation
from fulmen_llm_proxy.limits.prices import Price
from fulmen_llm_proxy.routing.seats import Seat, Seats
from fulmen_llm_proxy.routing.table import Backend, Target
from fulmen_llm_proxy.routing.table_holder import TableHolder


@dataclass(slots=True)
class Permit:
    """The admission of a call; to be closed exactly once, however the call ends."""

    gate: Gate
    caller: Caller
    request: CallRequest
    reservation: Reservation | None
    budgets: list[Budget]
    held_micros: float = 0.0
    at_backends: dict[str, Reservation] | None = None
    seat: Seat | None = None

    def enter(self, backend: Backend, target: Target) -> None:
        """Admits the call to a backend, where it counts once, however many tries it makes there.

        Raises:
            ModelLimitExceeded: if a limit of the backend is exhausted.
            PriceUnknown: if a budget pays for the call, and the target's model has no price.
        """
        if self.budgets:
            self._hold(self.gate.meter.estimated_micros(self.budgets[0], self.request, target))
        if not (backend.requests_per_minute or backend.tokens_per_minute):
            return
        if self.at_backends is None:
            self.at_backends = {}
        if backend.id not in self.at_backends:
            self.at_backends[backend.id] = self.gate.meter.enter(backend, self.request)

    def price_of(self, target: Target) -> Price | None:
        """Returns the price of a target's model; None without one."""
        return self.gate.meter.price_of(target)

    def _hold(self, micros: float) -> None:
        """Reserves a cost in the call's budgets, in place of what it has reserved."""
        for budget in self.budgets:
            budget.reserved += micros - self.held_micros
        self.held_micros = micros

    def sit(self, seat: Seat | None, tokens: int) -> None:
        """Counts the call at the seat of its attempt, and no longer at another.

        Args:
            tokens: estimated length of the conversation, for a seat whose length is unknown.
        """
        if seat is self.seat:
            return
        if self.seat is not None:
            self.gate.seats.end(self.seat, tokens=0)
        self.seat = seat
        if seat is not None:
            seat.calls += 1
            if not seat.tokens:
                seat.resize(tokens)

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
        if self.seat is not None:
            gate.seats.end(self.seat, tokens=tokens)
        self._hold(0.0)
        gate.meter.count(self.caller, self.request, known, target=target, budgets=self.budgets, failed=failed)
        return known


class Gate:
    """Admits calls while there is capacity."""

    def __init__(
        self,
        *,
        tables: TableHolder,
        queue: CaptureQueue,
        guard: AttemptGuard,
        meter: Meter,
        seats: Seats,
        max_in_flight: int,
    ) -> None:
        """Sets the checks.

        Args:
            seats: where attempts are seated.
            max_in_flight: maximum number of calls in flight in this process; further calls get 429.
        """
        self._tables = tables
        self._queue = queue
        self._guard = guard
        self._max_in_flight = max_in_flight
        self.meter = meter
        self.seats = seats
        self.in_flight = 0

    def admit(self, caller: Caller, request: CallRequest) -> Permit:
        """Admits a call.

        Raises:
            AttemptOver: if the caller's attempt has ended.
            ModelLimitExceeded: if a limit of its project or attempt is exhausted.
            TokenBudgetExceeded: if its attempt has used up its token budget.
            BudgetExceeded: if a budget in dollars is used up.
            Refused: if the process has reached its maximum of calls in flight.
            Unavailable: until the routes are loaded, or while the capture buffer is full; retryable.
        """
        if caller.attribution is not None:
            self._guard.require(caller.attribution)
        self._tables.require_loaded()
        self._require_room()
        if caller.attribution is not None and self._queue.is_full:
            raise Unavailable("The capture buffer is full and the store is unavailable.")
        budgets = self.meter.budgets(caller, request)
        reservation = self.meter.admit(caller, request)
        self.in_flight += 1
        return Permit(self, caller, request, reservation, budgets)

    def _require_room(self) -> None:
        if self.in_flight >= self._max_in_flight:
            raise Refused(429, "too_many_calls", "The proxy has reached its maximum of calls in flight.")

    @contextmanager
    def pass_on(self, caller: Caller, backend: Backend, *, what: str) -> Iterator[None]:
        """Admits a request that is passed on unread, until the end of its block, and counts it as usage of `what`.

        Raises:
            AttemptOver: if the caller's attempt has ended, also while the request runs.
            ModelLimitExceeded, TokenBudgetExceeded: if a limit of its project, its attempt or the backend is exhausted.
            PriceUnknown: if a budget in dollars pays for the caller's calls: what this one costs is unknown.
            Refused: if the process has reached its maximum of calls in flight.
        """
        attribution = caller.attribution
        with nullcontext() if attribution is None else AttemptTie(self._guard, attribution):
            self._require_room()
            with self.meter.pass_on(caller, backend, what=what):
                self.in_flight += 1
                try:
                    yield
                finally:
                    self.in_flight -= 1
