"""Agents that are generators: each yield ends a step, and a number that is yielded is that step's reward.

Invariant: a generator is closed in the context, and in the task or thread, that it ran in, however it ends.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass

from fulmen.agent import begin_step
from fulmen.emit import as_number, emit_reward


class Stopped(Exception):
    """A generator was told to stop between two of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """How a generator ended; `value` is what it returned, or else (`returned` is False) the last thing it yielded."""

    value: object
    returned: bool


async def walk_async(generator: AsyncGenerator[object, None], *, rewarded: bool) -> Walked:
    """Takes every step of an async generator; being cancelled, it closes the generator.

    Args:
        generator: Not begun yet.
        rewarded: True if numbers that it yields are rewards.

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
                # It caught its cancellation and went on.
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
    """Takes every step of a generator in this thread.

    Args:
        generator: Not begun yet.
        rewarded: True if numbers that it yields are rewards.
        stop: Set to end it after the step that it is in.

    Raises:
        RewardInvalid: If it yields a number that is not finite.
        Stopped: If it was told to stop.
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
