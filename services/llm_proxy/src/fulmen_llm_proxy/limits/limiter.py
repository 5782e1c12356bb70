"""Rate limits of model calls: requests and tokens per minute, concurrent calls, and token budgets of attempts.

A call reserves tokens when it starts: its estimated prompt and its maximum completion. Its actual usage replaces the
reservation when it ends. Tokens count in the slot in which the call started; usage beyond the reservation counts when
it becomes known.

Invariants: with one process, no minute holds more calls than the limit, nor more tokens than the limit plus the usage
beyond reservations; every reservation is released exactly once. With several processes, each adds the last
reported counts of the others, about a second old. One event loop owns the limiter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fulmen.errors import ModelLimitExceeded, TokenBudgetExceeded
from fulmen_llm_proxy.limits.sliding_count import SLOT_S, SLOTS, SlidingCount, free_at_s

KEEP_SLOTS: Final = 1200
"""Slots for which counts are kept after the last call: an hour. The store keeps the usage of attempts for longer."""

MAX_STATES: Final = 100_000
"""Maximum number of states kept; the least recently used are dropped first, unless calls hold them."""

BUSY_RETRY_S: Final = 1.0
"""`Retry-After` if the end of other calls cannot be predicted, seconds."""

LimitKey = tuple[str, str, str]
"""Names of project, backend and attempt; the last two are empty for limits of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Rate and concurrency limits; 0 means unlimited."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_calls: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_calls)


NO_LIMITS: Final = CallLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectLimits:
    """Limits of a project: for all its calls together, and for each attempt; a budget of 0 means unlimited."""

    project: CallLimits = NO_LIMITS
    attempt: CallLimits = NO_LIMITS
    attempt_token_budget: int = 0

    def __bool__(self) -> bool:
        return bool(self.project or self.attempt or self.attempt_token_budget)


@dataclass(slots=True, kw_only=True, eq=False)
class LimitState:
    """The counts of one limit.

    Attributes:
        in_flight: running calls of this process.
        reserved: tokens reserved by them.
        remote_requests: last reported count of the other processes; likewise `remote_tokens`, `remote_in_flight`,
            `remote_reserved`.
        stored_tokens: for an attempt, usage of all processes as last reported by the store.
        unreported_tokens: for an attempt, usage of this process that is not in `stored_tokens`.
        touched: slot of the latest start or end of a call.
    """

    key: LimitKey
    requests: SlidingCount = field(default_factory=SlidingCount)
    tokens: SlidingCount = field(default_factory=SlidingCount)
    in_flight: int = 0
    reserved: int = 0
    remote_requests: SlidingCount = field(default_factory=SlidingCount)
    remote_tokens: SlidingCount = field(default_factory=SlidingCount)
    remote_in_flight: int = 0
    remote_reserved: int = 0
    stored_tokens: int = 0
    unreported_tokens: int = 0
    touched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The counts of a limit as processes exchange them: by slot, newest first."""

    key: LimitKey
    requests: Sequence[int]
    tokens: Sequence[int]
    in_flight: int
    reserved: int


@dataclass(slots=True)
class Reservation:
    """The share of limits held by a running call.

    Attributes:
        slot: slot in which it started.
        tokens: tokens reserved in each limit.
    """

    states: list[LimitState]
    slot: int
    tokens: list[int]


class CallLimiter:
    """Admits calls within the limits."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """Sets the clock shared by all processes, seconds since 1970; it never moves back."""
        self._clock = clock
        self._projects: Mapping[str, ProjectLimits] = {}
        # Least recently used first.
        self._states: dict[LimitKey, LimitState] = {}
        # States with running calls.
        self._busy: dict[LimitKey, LimitState] = {}
        self._remote_keys: set[LimitKey] = set()

    def set_projects(self, limits: Mapping[str, ProjectLimits]) -> None:
        """Replaces the limits of all projects."""
        self._projects = limits

    def is_unlimited(self, project: str, budget: int) -> bool:
        """Returns whether no limit applies to a call of this project whose key carries this budget."""
        return not budget and project not in self._projects

    def admit(self, project: str, *, attempt: str, budget: int, tokens: int) -> Reservation:
        """Admits a call.

        Args:
            project: project of the caller.
            attempt: attempt of the caller; empty if it is not an attempt.
            budget: token budget in the attempt's key; 0 applies the project's.
            tokens: tokens to reserve.

        Raises:
            ModelLimitExceeded: if a limit is exhausted; names it, and when to retry.
            TokenBudgetExceeded: if the attempt has used up its token budget.
        """
        limits = self._projects.get(project, _UNLIMITED)
        now_s = self._clock()
        slot = int(now_s // SLOT_S)
        states, reserved = [], []
        if limits.project:
            states.append(self._state((project, "", ""), slot))
            reserved.append(_check(states[-1], limits.project, tokens, project, slot, now_s))
        if attempt:
            budget = budget or limits.attempt_token_budget
            if budget or limits.attempt:
                states.append(self._state((project, "", attempt), slot))
                if budget:
                    _check_budget(states[-1], budget, attempt)
                reserved.append(_check(states[-1], limits.attempt, tokens, attempt, slot, now_s))
        return self._reserve(states, slot, reserved)

    def enter(self, project: str, *, backend: str, limits: CallLimits, tokens: int) -> Reservation:
        """Admits a call to a backend.

        Raises:
            ModelLimitExceeded: if the backend's limit is exhausted.
        """
        now_s = self._clock()
        slot = int(now_s // SLOT_S)
        state = self._state((project, backend, ""), slot)
        return self._reserve([state], slot, [_check(state, limits, tokens, backend, slot, now_s)])

    def settle(self, reservation: Reservation, used: int) -> None:
        """Releases a reservation and counts the actual usage."""
        slot = int(self._clock() // SLOT_S)
        for state, reserved in zip(reservation.states, reservation.tokens, strict=True):
            state.in_flight -= 1
            state.reserved -= reserved
            if not state.in_flight:
                del self._busy[state.key]
            self._touch(state, slot)
            if used < reserved:
                state.tokens.correct(reservation.slot, used - reserved)
            elif used > reserved:
                state.tokens.add(slot, used - reserved)
            if state.key[2]:
                state.unreported_tokens += used

    def windows(self) -> tuple[int, list[Window]]:
        """Returns the current slot, and the windows to report: limits used within the last minute."""
        slot = int(self._clock() // SLOT_S)
        self._forget(slot)
        reported = dict(self._busy)
        for key in reversed(self._states):
            state = self._states[key]
            if slot - state.touched > SLOTS:
                break
            reported[key] = state
        return slot, [
            Window(
                key=state.key,
                requests=state.requests.recent(slot),
                tokens=state.tokens.recent(slot),
                in_flight=state.in_flight,
                reserved=state.reserved,
            )
            for state in reported.values()
        ]

    def apply_remote(self, slot: int, others: Sequence[Window]) -> None:
        """Applies the windows of the other processes; a limit without a window has no calls there."""
        received = set()
        for window in others:
            # The limit may be unused in this process.
            state = self._state(window.key, slot)
            received.add(window.key)
            state.remote_requests.replace(slot, window.requests)
            state.remote_tokens.replace(slot, window.tokens)
            state.remote_in_flight, state.remote_reserved = window.in_flight, window.reserved
        for key in self._remote_keys - received:
            silent = self._states.get(key)
            if silent is not None:
                silent.remote_in_flight = silent.remote_reserved = 0
        self._remote_keys = received

    def forget_minute(self) -> None:
        """Resets the counts by time after the clock moved back; running calls and usage of attempts remain."""
        for state in self._states.values():
            state.requests, state.tokens = SlidingCount(), SlidingCount()
            state.remote_requests, state.remote_tokens = SlidingCount(), SlidingCount()
            state.touched = int(self._clock() // SLOT_S)

    def apply_stored(self, reported: Mapping[LimitKey, int], stored: Mapping[LimitKey, int]) -> None:
        """Applies the store's token counts of attempts.

        Args:
            reported: tokens that this process reported, by limit.
            stored: usage of all processes, by limit; missing for attempts unknown to the store.
        """
        for key, tokens in reported.items():
            state = self._states.get(key)
            if state is not None:
                # Usage from before the attempt had a limit was not counted here.
                mine = min(tokens, state.unreported_tokens)
                state.unreported_tokens -= mine
                state.stored_tokens += mine
        for key, tokens in stored.items():
            state = self._states.get(key)
            if state is not None:
                state.stored_tokens = tokens

    def _state(self, key: LimitKey, slot: int) -> LimitState:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = LimitState(key=key, touched=slot)
        return state

    def _reserve(self, states: list[LimitState], slot: int, tokens: list[int]) -> Reservation:
        """Reserves the checked tokens. Nothing is reserved before all checks, so a refusal releases nothing."""
        for state, reserved in zip(states, tokens, strict=True):
            state.requests.add(slot, 1)
            state.tokens.add(slot, reserved)
            state.in_flight += 1
            state.reserved += reserved
            self._busy[state.key] = state
            self._touch(state, slot)
        return Reservation(states, slot, tokens)

    def _touch(self, state: LimitState, slot: int) -> None:
        state.touched = slot
        self._states.pop(state.key, None)
        self._states[state.key] = state

    def _forget(self, slot: int) -> None:
        """Drops states that have been unused for long, and the oldest ones beyond the maximum number."""
        spare = len(self._states) - MAX_STATES
        while self._states:
            key, state = next(iter(self._states.items()))
            if slot - state.touched <= KEEP_SLOTS and spare <= 0:
                return
            del self._states[key]
            spare -= 1
            if state.in_flight or state.unreported_tokens:
                # In use: moves to the end, so that it does not block the others.
                self._touch(state, slot)


_UNLIMITED: Final = ProjectLimits()


def _check(state: LimitState, limits: CallLimits, tokens: int, of: str, slot: int, now_s: float) -> int:
    """Checks the limits for a call; returns the tokens to reserve, at most the limit so that any call can run."""
    maximum = limits.concurrent_calls
    if maximum and state.in_flight + state.remote_in_flight >= maximum:
        raise _exceeded("concurrent_calls", of, maximum, BUSY_RETRY_S)
    maximum = limits.requests_per_minute
    if maximum:
        excess = state.requests.total(slot) + state.remote_requests.total(slot) + 1 - maximum
        if excess > 0:
            wait_s = free_at_s((state.requests, state.remote_requests), excess) - now_s
            raise _exceeded("requests_per_minute", of, maximum, wait_s)
    maximum = limits.tokens_per_minute
    if maximum:
        tokens = min(tokens, maximum)
        excess = state.tokens.total(slot) + state.remote_tokens.total(slot) + tokens - maximum
        if excess > 0:
            wait_s = free_at_s((state.tokens, state.remote_tokens), excess) - now_s
            raise _exceeded("tokens_per_minute", of, maximum, wait_s)
    return tokens


def _check_budget(state: LimitState, budget: int, attempt: str) -> None:
    used = state.stored_tokens + state.unreported_tokens
    if used >= budget:
        raise TokenBudgetExceeded(
            f"Token budget of {budget} exhausted: the attempt has used {used} tokens.",
            attempt=attempt,
            budget=budget,
            used=used,
        )
    if used + state.reserved + state.remote_reserved >= budget:
        # Running calls may use up the budget, or less than they have reserved.
        raise _exceeded("attempt_token_budget", attempt, budget, BUSY_RETRY_S)


def _exceeded(limit: str, of: str, size: int, wait_s: float) -> ModelLimitExceeded:
    wait_s = max(wait_s, 0.0)
    return ModelLimitExceeded(
        f"Limit {limit} of {of} exceeded ({size}); retry in {wait_s:.0f} s.",
        retry_after_s=wait_s,
        limit=limit,
        of=of,
        size=size,
    )
