"""A trainer as the engines and the agents see it: it takes rollouts by batches, and each step ends with new weights everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.llm_proxy.simulated_engine import SimulatedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a trainer does.

    Attributes:
        batch: rollouts of a step.
        step_s: duration of a step, seconds.
        ahead_steps: steps by which rollouts may be ahead of training.
        swap_s: time for which engines stand still for new weights, seconds; their caches are empty then.
    """

    batch: int
    step_s: float
    ahead_steps: int
    swap_s: float


class Consumer:
    """The trainer; `run` is its loop."""

    def __init__(self, training: Training, engines: Sequence[SimulatedEngine]) -> None:
        self._training = training
        self._engines = engines
        self._changed = asyncio.Condition()
        self._begun = self._ended = self._steps = 0

    async def begin(self) -> None:
        """Waits until one more rollout may begin."""
        given = self._training
        async with self._changed:
            await self._changed.wait_for(lambda: self._begun < given.batch * (self._steps + 1 + given.ahead_steps))
            self._begun += 1

    async def end(self) -> None:
        """Takes a rollout that has ended."""
        async with self._changed:
            self._ended += 1
            self._changed.notify_all()

    async def run(self) -> None:
        """Trains until it is cancelled."""
        given = self._training
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._ended >= given.batch * (self._steps + 1))
            await asyncio.sleep(given.step_s)
            swaps = [asyncio.create_task(self._swap(engine)) for engine in self._engines]
            await asyncio.gather(*swaps)
            async with self._changed:
                self._steps += 1
                self._changed.notify_all()

    async def _swap(self, engine: SimulatedEngine) -> None:
        engine.open.clear()
        await asyncio.sleep(self._training.swap_s)
        engine.forget()
        engine.open.set()
