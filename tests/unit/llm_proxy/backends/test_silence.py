"""One timer bounds the silence of a backend, however many pieces come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import aiohttp

from fulmen_llm_proxy.backends.client import PatientHandler


@dataclass(eq=False)
class Timer:
    """What an event loop hands out."""

    due_s: float
    told: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancels it."""
        self.cancelled = True


@dataclass
class Clock:
    """The part of an event loop that tells time."""

    now_s: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        """Returns the time."""
        return self.now_s

    def call_later(self, delay_s: float, told: Callable[[], None]) -> Timer:
        """Sets a timer."""
        self.timers.append(Timer(self.now_s + delay_s, told))
        return self.timers[-1]

    def go_to(self, now_s: float) -> None:
        """Lets time pass."""
        while due := [timer for timer in self.timers if timer.due_s <= now_s]:
            first = min(due, key=lambda timer: timer.due_s)
            self.timers.remove(first)
            self.now_s = first.due_s
            if not first.cancelled:
                first.told()
        self.now_s = now_s


def handler_of(clock: Clock, silence_s: float) -> PatientHandler:
    handler = PatientHandler(cast("asyncio.AbstractEventLoop", clock))
    handler.read_timeout = silence_s
    handler.start_timeout()
    return handler


def test_pieces_put_the_end_of_the_silence_off_without_timers_of_their_own() -> None:
    clock = Clock()
    handler = handler_of(clock, 10.0)
    for now_s in (1.0, 4.0, 9.0):
        clock.go_to(now_s)
        handler.data_received(b"piece")
    assert len(clock.timers) == 1
    clock.go_to(18.9)
    assert handler.exception() is None
    clock.go_to(19.0)
    assert isinstance(handler.exception(), aiohttp.SocketTimeoutError)


def test_a_shorter_silence_holds_as_soon_as_it_is_set() -> None:
    clock = Clock()
    handler = handler_of(clock, 100.0)
    clock.go_to(50.0)
    handler.read_timeout = 5.0
    handler.data_received(b"piece")
    clock.go_to(54.9)
    assert handler.exception() is None
    clock.go_to(55.0)
    assert isinstance(handler.exception(), aiohttp.SocketTimeoutError)


def test_an_answer_that_ended_is_not_waited_for() -> None:
    clock = Clock()
    handler = handler_of(clock, 10.0)
    clock.go_to(1.0)
    handler.data_received(b"piece")
    handler.eof_received()
    clock.go_to(1000.0)
    assert handler.exception() is None
