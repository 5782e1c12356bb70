"""Limits of model calls: requests and tokens per minute, calls at once, tokens of an attempt in all.

A call reserves tokens when it begins: its prompt, estimated, and what it may sample at most. What it used is known at
its end and takes the place of the reservation. Tokens count in the slot in which the call began; what a call uses beyond
its reservation counts when that is known.

Invariants: with one process no minute holds more calls than the limit, nor more tokens than the limit and what its calls
used beyond their reservations; every reservation comes back exactly once. With several, each adds to its own counts what
the others said last, about a second ago. One event loop owns all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fulmen.errors import ModelLimitExceeded, TokenBudgetExceeded
from fulmen_llm_proxy.limits.sliding_count import SLOT_S, SLOTS, SlidingCount, free_at_s

KEEP_SLOTS: Final = 1200
"""For how long an account is kept after its last call: an hour. What attempts used, the store knows for longer."""

MAX_STATES: Final = 100_000
"""Accounts that are kept at most; those that were not used for longest go first, unless calls run on them."""

BUSY_RETRY_S: Final = 1.0
"""What a call is told to wait when it is not known when another one will end."""

LimitKey = tuple[str, str, str]
"""Names of project, backend and attempt; the last two are empty where the limit is not theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits per time and at once; 0 is none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_calls: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_calls)


NO_LIMITS: Final = CallLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectLimits:
    """What a project says of all its calls together, and of those of each attempt; a budget of 0 is none."""

    project: CallLimits = NO_LIMITS
    attempt: CallLimits = NO_LIMITS
    attempt_token_budget: int = 0

    def __bool__(self) -> bool:
        return bool(self.project or self.attempt or self.attempt_token_budget)


@dataclass(slots=True, kw_only=True, eq=False)
class LimitState:
    """What is known of one limit.

    Attributes:
        in_flight: calls that run here.
        reserved: tokens that these have reserved.
        other_requests: what the other processes said last, as `other_tokens`, `others_in_flight`, `others_reserved`.
        stored_tokens: of an attempt: what all processes used, as the store said last.
        untold_tokens: of an attempt: what was used here and is not among `stored_tokens`.
        touched: the slot of the last call's begin or end.
    """

    key: LimitKey
    requests: SlidingCount = field(default_factory=SlidingCount)
    tokens: SlidingCount = field(default_factory=SlidingCount)
    in_flight: int = 0
    reserved: int = 0
    other_requests: SlidingCount = field(default_factory=SlidingCount)
    other_tokens: SlidingCount = field(default_factory=SlidingCount)
    others_in_flight: int = 0
    others_reserved: int = 0
    stored_tokens: int = 0
    untold_tokens: int = 0
    touched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One limit as processes tell one another: counts by slot, newest first."""

    key: LimitKey
    requests: Sequence[int]
    tokens: Sequence[int]
    in_flight: int
    reserved: int


@dataclass(slots=True)
class Reservation:
    """What one call has taken of some limits until it ends.

    Attributes:
        slot: when it began.
        tokens: what it has reserved of each.
    """

    states: list[LimitState]
    slot: int
    tokens: list[int]


class CallLimiter:
    """Lets calls in while the limits leave room for them."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """Takes the clock that all processes share, in seconds since 1970; it never goes back."""
        self._clock = clock
        self._projects: Mapping[str, ProjectLimits] = {}
        # In order of the last use, oldest first.
        self._states: dict[LimitKey, LimitState] = {}
        # Those with calls.
        self._busy: dict[LimitKey, LimitState] = {}
        self._heard: set[LimitKey] = set()

    def set_projects(self, limits: Mapping[str, ProjectLimits]) -> None:
        """Takes the limits of all projects that have some."""
        self._projects = limits

    def limits_nobody(self, project: str, budget: int) -> bool:
        """Tells whether a call of this project, whose key names this budget, needs not be admitted."""
        return not budget and project not in self._projects

    def admit(self, project: str, *, attempt: str, budget: int, tokens: int) -> Reservation:
        """Lets a call in, or not.

        Args:
            project: the caller's.
            attempt: that of the caller; empty if it is none.
            budget: how many tokens the attempt may use, as its key says; 0: as the project says.
            tokens: how many the call reserves.

        Raises:
            ModelLimitExceeded: if a limit leaves no room; says which, and when there will be some.
            TokenBudgetExceeded: if the attempt has used its budget.
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
        """Lets a call go to a backend, or not.

        Raises:
            ModelLimitExceeded: if the backend's limit leaves no room.
        """
        now_s = self._clock()
        slot = int(now_s // SLOT_S)
        state = self._state((project, backend, ""), slot)
        return self._reserve([state], slot, [_check(state, limits, tokens, backend, slot, now_s)])

    def settle(self, reservation: Reservation, used: int) -> None:
        """Takes back what a call has reserved, and counts what it used."""
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
                state.untold_tokens += used

    def windows(self) -> tuple[int, list[Window]]:
        """Returns the present slot, and what the other processes should know: limits with calls within the last minute."""
        slot = int(self._clock() // SLOT_S)
        self._forget(slot)
        told = dict(self._busy)
        for key in reversed(self._states):
            state = self._states[key]
            if slot - state.touched > SLOTS:
                break
            told[key] = state
        return slot, [
            Window(
                key=state.key,
                requests=state.requests.recent(slot),
                tokens=state.tokens.recent(slot),
                in_flight=state.in_flight,
                reserved=state.reserved,
            )
            for state in told.values()
        ]

    def hear(self, slot: int, others: Sequence[Window]) -> None:
        """Takes what the other processes said; of a limit of which nothing is said nothing runs there."""
        heard = set()
        for window in others:
            # It may be that of a project or backend of which there was no call here.
            state = self._state(window.key, slot)
            heard.add(window.key)
            state.other_requests.replace(slot, window.requests)
            state.other_tokens.replace(slot, window.tokens)
            state.others_in_flight, state.others_reserved = window.in_flight, window.reserved
        for key in self._heard - heard:
            silent = self._states.get(key)
            if silent is not None:
                silent.others_in_flight = silent.others_reserved = 0
        self._heard = heard

    def forget_minute(self) -> None:
        """Forgets what was counted by time: the clock was set back. What runs, and what attempts used, stays."""
        for state in self._states.values():
            state.requests, state.tokens = SlidingCount(), SlidingCount()
            state.other_requests, state.other_tokens = SlidingCount(), SlidingCount()
            state.touched = int(self._clock() // SLOT_S)

    def counted(self, told: Mapping[LimitKey, int], stored: Mapping[LimitKey, int]) -> None:
        """Takes note that the store has counted tokens of attempts.

        Args:
            told: what was told of each attempt.
            stored: what all processes used; the store does not say it of attempts that it does not know.
        """
        for key, tokens in told.items():
            state = self._states.get(key)
            if state is not None:
                # What was used before the attempt had a limit was never held here.
                mine = min(tokens, state.untold_tokens)
                state.untold_tokens -= mine
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
        """Takes what was checked; nothing was taken before, so that a refusal has nothing to give back."""
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
        """Forgets what nobody used for long, and so many more of the oldest as there are too many."""
        spare = len(self._states) - MAX_STATES
        while self._states:
            key, state = next(iter(self._states.items()))
            if slot - state.touched <= KEEP_SLOTS and spare <= 0:
                return
            del self._states[key]
            spare -= 1
            if state.in_flight or state.untold_tokens:
                # It is in use: to the end of the line, so that it does not hold up the others.
                self._touch(state, slot)


_UNLIMITED: Final = ProjectLimits()


def _check(state: LimitState, limits: CallLimits, tokens: int, of: str, slot: int, now_s: float) -> int:
    """Checks whether there is room for a call; returns what it reserves: no more than the limit, or it would never run."""
    most = limits.concurrent_calls
    if most and state.in_flight + state.others_in_flight >= most:
        raise _exceeded("concurrent_calls", of, most, BUSY_RETRY_S)
    most = limits.requests_per_minute
    if most:
        excess = state.requests.total(slot) + state.other_requests.total(slot) + 1 - most
        if excess > 0:
            wait_s = free_at_s((state.requests, state.other_requests), excess) - now_s
            raise _exceeded("requests_per_minute", of, most, wait_s)
    most = limits.tokens_per_minute
    if most:
        tokens = min(tokens, most)
        excess = state.tokens.total(slot) + state.other_tokens.total(slot) + tokens - most
        if excess > 0:
            wait_s = free_at_s((state.tokens, state.other_tokens), excess) - now_s
            raise _exceeded("tokens_per_minute", of, most, wait_s)
    return tokens


def _check_budget(state: LimitState, budget: int, attempt: str) -> None:
    used = state.stored_tokens + state.untold_tokens
    if used >= budget:
        raise TokenBudgetExceeded(
            f"The attempt has used its budget of {budget} tokens: {used}.",
            attempt=attempt,
            budget=budget,
            used=used,
        )
    if used + state.reserved + state.others_reserved >= budget:
        # Calls that run may use up the budget, or less than they reserved.
        raise _exceeded("attempt_token_budget", attempt, budget, BUSY_RETRY_S)


def _exceeded(limit: str, of: str, size: int, wait_s: float) -> ModelLimitExceeded:
    wait_s = max(wait_s, 0.0)
    return ModelLimitExceeded(
        f"The limit {limit} of {of} is {size} and used up; try again in {wait_s:.0f} s.",
        retry_after_s=wait_s,
        limit=limit,
        of=of,
        size=size,
    )
