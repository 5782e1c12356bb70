"""Engines of the simulation: each shares its speed among the calls that are in it, and seats as many attempts as its cache holds.

A call that is alone takes `alone_s + beside_s`, and each call beside it makes it `beside_s` longer: steps of decoding take longer with more
conversations to read, and prompts of others are computed in between. The proxy seats an attempt where the fewest are.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.scale.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """What one engine does.

    Attributes:
        alone_s: part of a call's time that does not depend on others, seconds.
        beside_s: what a call adds to the time of each call that is there, itself included, seconds.
        seats: attempts whose conversations fit into the cache together; 0: all.
        swap_s: time for which it stands still for new weights, seconds.
        recompute_s: time in which it computes a conversation anew that it had in its cache before new weights, seconds.
    """

    alone_s: float = 0.0
    beside_s: float = 0.0
    seats: int = 0
    swap_s: float = 0.0
    recompute_s: float = 0.0

    def call_s(self, calls: int) -> float:
        """Returns the duration of a call while so many are in the engine, seconds."""
        return self.alone_s + self.beside_s * calls


class _Engine:
    """One engine. Its progress is that of a call which is always there: calls end when they have made as much as they need."""

    def __init__(self, simulation: Simulation, speed: EngineSpeed) -> None:
        self._simulation = simulation
        self._speed = speed
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._progress = 0.0
        self._since_s = 0.0
        self._still_until_s = 0.0
        self._plan = 0
        self.seated = 0
        self.weights = 0
        self.work = 0.0

    def add(self, work: float, then: Callable[[], None]) -> None:
        """Begins a call that is as long as so many mean ones."""
        self._advance()
        if self._simulation.counts:
            self.work += work
        heapq.heappush(self._calls, (self._progress + work, next(self._numbers), then))
        self._next()

    def swap(self) -> None:
        """Stands still, and has an empty cache after it."""
        self._advance()
        self.weights += 1
        self._still_until_s = self._simulation.now_s + self._speed.swap_s
        self._next()

    def _advance(self) -> None:
        now_s = self._simulation.now_s
        since_s = max(self._since_s, min(now_s, self._still_until_s))
        if self._calls:
            self._progress += (now_s - since_s) / self._speed.call_s(len(self._calls))
        self._since_s = now_s

    def _next(self) -> None:
        """Plans the next end; plans made before are void."""
        self._plan += 1
        if not self._calls:
            return
        plan = self._plan
        left_s = max(0.0, self._calls[0][0] - self._progress) * self._speed.call_s(len(self._calls))
        still_s = max(0.0, self._still_until_s - self._simulation.now_s)
        self._simulation.after(still_s + left_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        self._progress, _, then = heapq.heappop(self._calls)
        self._next()
        then()


@dataclass(slots=True, eq=False)
class Seat:
    """Where an attempt is, with the weights of its latest call."""

    engine: _Engine
    weights: int


class Engines:
    """All engines of a policy."""

    def __init__(self, simulation: Simulation, speed: EngineSpeed, number: int) -> None:
        self._simulation = simulation
        self._speed = speed
        self._engines = [_Engine(simulation, speed) for _ in range(number)]
        self._waiting: deque[Callable[[Seat], None]] = deque()
        self._held_s = 0.0
        self._held_since_s = 0.0
        self._held = 0

    def seat(self, then: Callable[[Seat], None]) -> None:
        """Gives an attempt a seat where the fewest are, as soon as there is one."""
        engine = min(self._engines, key=lambda one: one.seated)
        if self._speed.seats and engine.seated >= self._speed.seats:
            self._waiting.append(then)
            return
        self._count(1)
        engine.seated += 1
        then(Seat(engine, engine.weights))

    def leave(self, seat: Seat) -> None:
        """Frees the seat of an attempt that has ended."""
        self._count(-1)
        seat.engine.seated -= 1
        if self._waiting:
            self.seat(self._waiting.popleft())

    def serve(self, seat: Seat, work: float, then: Callable[[], None]) -> None:
        """Serves a call that is as long as so many mean ones, and longer if its conversation is no longer cached."""
        engine, speed = seat.engine, self._speed
        if seat.weights != engine.weights and speed.beside_s:
            work += speed.recompute_s / speed.beside_s
            seat.weights = engine.weights
        engine.add(work, then)

    def swap(self) -> None:
        """Gives all engines new weights."""
        for engine in self._engines:
            engine.swap()

    def busy(self, seconds: float) -> dict[str, float]:
        """Returns how much of the engines' time calls took, and how many seats were held, as shares, in so many seconds."""
        self._count(0)
        made = sum(engine.work for engine in self._engines) * self._speed.beside_s
        shares = {"engines": made / (len(self._engines) * seconds)}
        if self._speed.seats:
            shares["seats"] = self._held_s / (len(self._engines) * self._speed.seats * seconds)
        return shares

    def _count(self, change: int) -> None:
        now_s = self._simulation.now_s
        if self._simulation.counts:
            self._held_s += self._held * (now_s - self._held_since_s)
        self._held_since_s = now_s
        self._held += change
