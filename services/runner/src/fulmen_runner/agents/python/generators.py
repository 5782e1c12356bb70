"""Agents that are generators: each yield ends a step; a yielded number is the reward of that step.

Invariant: a generator is always closed in the context, and in the task or thread, in which it ran.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass

from fulmen.agent import begin_step
from fulmen.emit import as_number, emit_reward


class Stopped(Exception):
    """A generator was stopped between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """The end of a generator: its return value, or (`returned` is False) the last value that it yielded."""

    value: object
    returned: bool


async def walk_async(generator: AsyncGenerator[object, None], *, rewarded: bool) -> Walked:
    """Runs an async generator to its end. On cancellation, closes it.

    Args:
        generator: Not started.
        rewarded: Whether yielded numbers are rewards.

    Raises:
        RewardInvalid: If it yields a number that is not finite.
    """
    task = asyncio.current_task()
    last: object = None
    step = 0
    try:
        begin_step(step)
        async for value in generator:
            if task is not None and task.cancelling():
                # The generator swallowed its cancellation.
                raise asyncio.CancelledError
            last = value
            _end_step(step, value, rewarded=rewarded)
            step += 1
            begin_step(step)
    finally:
        await generator.aclose()
        begin_step(None)
    return Walked(value=last, returned=False)


def walk(generator: Generator[object, None, object], *, rewarded: bool, stop: threading.Event) -> Walked:
    """Runs a generator to its end in this thread.

    Args:
        generator: Not started.
        rewarded: Whether yielded numbers are rewards.
        stop: Set to stop it after the current step.

    Raises:
        RewardInvalid: If it yields a number that is not finite.
        Stopped: If `stop` was set.
    """
    last: object = None
    step = 0
    try:
        while not stop.is_set():
            begin_step(step)
            try:
                last = next(generator)
            except StopIteration as end:
                returned = end.value is not None
                return Walked(value=end.value if returned else last, returned=returned)
            _end_step(step, last, rewarded=rewarded)
            step += 1
        raise Stopped
    finally:
        generator.close()
        begin_step(None)


def _end_step(step: int, value: object, *, rewarded: bool) -> None:
    if rewarded and as_number(value) is not None:
        emit_reward(value, step=step)  # type: ignore[arg-type]  # Checked above: it is a number.
