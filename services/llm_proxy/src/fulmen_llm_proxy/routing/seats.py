"""Where the conversation of each attempt is cached, and which attempts may call.

An attempt that calls through a sticky route takes a seat at a replica, and stays there: its conversation is in that
engine's prefix cache. A new attempt takes its seat where the fewest are. An engine serves the attempts that were
seated first, as many as have their conversations in its cache together; the calls of the others wait in the proxy while
it is busy with those. Without this, one attempt too many makes each turn evict what the next one needs, and every prompt is
computed anew. An engine that is not busy can afford that, so it lets the next one in.

Invariants: a seat with a call in progress or waiting is kept; one that is not used for a minute is given up. The
attempt that was seated first may always call, whatever its length. One event loop owns the seats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

IDLE_S: Final = 60.0
MAX_SEATS: Final = 100_000
"""Attempts beyond it have no seat: their calls are routed as if each were the first."""


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """The seat of an attempt that calls a model.

    Attributes:
        number: order in which attempts were seated.
        row: the engine where it is.
        tokens: prompt and answer of its latest call.
        calls: calls in progress or waiting.
        used_s: time of its latest call, monotonic seconds.
    """

    number: int
    row: Row
    tokens: int = 0
    calls: int = 0
    used_s: float = 0.0
    _turn: asyncio.Event | None = None

    @property
    def may_call(self) -> bool:
        """Whether the engine serves the attempt now."""
        return self.row.admits(self)

    @property
    def waits(self) -> bool:
        """Whether a call waits for the attempt's turn."""
        return self._turn is not None

    def resize(self, tokens: int) -> None:
        """Sets the length of the conversation."""
        self.row.tokens += tokens - self.tokens
        self.tokens = tokens
        self.row.wake()

    async def turn(self) -> None:
        """Waits until the attempt may call, or should be routed again. The caller sets the deadline."""
        if self._turn is None:
            self._turn = asyncio.Event()
        self.row.waiting += 1
        row = self.row
        try:
            await self._turn.wait()
        finally:
            row.waiting -= 1

    def wake(self) -> None:
        """Ends the wait of its calls."""
        if self._turn is not None:
            self._turn.set()
            self._turn = None


@dataclass(slots=True, eq=False)
class Row:
    """The seats at one engine, in the order in which they were taken.

    Attributes:
        backend_id: the engine's backend.
        cache_tokens: tokens of the engine's cache that they may fill; 0 if unknown: then all may call.
        tokens: sum of the seats' tokens.
        waiting: calls that wait.
    """

    backend_id: str = ""
    cache_tokens: int = 0
    tokens: int = 0
    waiting: int = 0
    seats: dict[int, Seat] = field(default_factory=dict)

    def admits(self, seat: Seat) -> bool:
        """Returns whether the conversations of this seat and all before it fit into the cache."""
        if not self.cache_tokens or self.tokens <= self.cache_tokens:
            return True
        return any(one is seat for one in self._served())

    def has_room(self, tokens: int) -> bool:
        """Returns whether another attempt could call immediately."""
        return not self.cache_tokens or self.tokens + tokens <= self.cache_tokens

    def set_cache_tokens(self, tokens: int) -> None:
        """Sets the tokens that the seats may fill; 0 if unknown. Calls that wait are routed again if it has changed."""
        if tokens != self.cache_tokens:
            self.cache_tokens = tokens
            self.wake_all()

    def wake(self) -> None:
        """Ends the waits of those who may call now."""
        if self.waiting:
            for seat in self._served():
                seat.wake()

    def wake_next(self, count: int) -> None:
        """Ends the waits of those seated first, so many."""
        if self.waiting:
            for seat in [one for one in self.seats.values() if one.waits][:count]:
                seat.wake()

    def wake_all(self) -> None:
        """Ends all waits, so that the calls are routed again."""
        if self.waiting:
            for seat in self.seats.values():
                seat.wake()

    def _served(self) -> Iterator[Seat]:
        left = self.cache_tokens or self.tokens
        for place, seat in enumerate(self.seats.values()):
            left -= seat.tokens
            if left < 0 and place:
                return
            yield seat


class Seats:
    """The seats of all attempts, by attempt and model."""

    def __init__(self, *, clock: Callable[[], float], max_seats: int = MAX_SEATS) -> None:
        """Creates an empty collection.

        Args:
            clock: monotonic clock, seconds.
        """
        self._clock = clock
        self._max_seats = max_seats
        self._numbers = count()
        self._seats: dict[int, dict[str, Seat]] = {}

    def find(self, attempt: int, model: str) -> Seat | None:
        """Returns the seat of an attempt, given by its key; None if it has none."""
        return self._seats.get(attempt, {}).get(model)

    def take(self, attempt: int, model: str, row: Row) -> Seat | None:
        """Returns the seat of an attempt at an engine, new or moved there; None if there are too many."""
        seat = self.find(attempt, model)
        if seat is None:
            if len(self._seats) >= self._max_seats:
                return None
            seat = Seat(number=next(self._numbers), row=row)
            self._seats.setdefault(attempt, {})[model] = seat
        elif seat.row is row:
            return seat
        else:
            _remove(seat)
            seat.row = row
            seat.wake()  # calls that wait at the engine before it
        row.seats[seat.number] = seat
        row.tokens += seat.tokens
        return seat

    def end(self, seat: Seat, tokens: int) -> None:
        """Notes the end of a call.

        Args:
            tokens: its prompt and answer; 0 if unknown.
        """
        seat.calls -= 1
        seat.used_s = self._clock()
        if tokens and seat.number in seat.row.seats:
            seat.resize(tokens)

    def leave(self, attempt: int) -> None:
        """Gives up the seats of an attempt that has ended, unless it calls."""
        self._drop(attempt, lambda _: True)

    def sweep(self) -> None:
        """Gives up the seats of attempts that have not called for a minute."""
        since_s = self._clock() - IDLE_S
        for attempt in list(self._seats):
            self._drop(attempt, lambda seat: seat.used_s < since_s)

    def _drop(self, attempt: int, is_over: Callable[[Seat], bool]) -> None:
        held = self._seats.get(attempt, {})
        for model, seat in list(held.items()):
            if not seat.calls and is_over(seat):
                del held[model]
                _remove(seat)
        if not held:
            self._seats.pop(attempt, None)


def _remove(seat: Seat) -> None:
    del seat.row.seats[seat.number]
    seat.row.tokens -= seat.tokens
    seat.row.wake()
