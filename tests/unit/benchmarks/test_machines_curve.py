"""The speed of an engine, as it is found in runs of one, and the trainer of the curve."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.machines import points
from benchmarks.machines.points import CALLS, FREE, ONE_GPU, PAUSE
from benchmarks.routing.consumer import Consumer, Training
from benchmarks.scale.engines import EngineSpeed
from benchmarks.scale.model import Deployment, predicted
from tests.support import leaping_clock
from tests.support.llm_proxy.simulated_engine import SimulatedEngine


def test_the_speed_of_an_engine_is_found_in_what_it_carries_alone() -> None:
    engine = EngineSpeed(alone_s=0.9, beside_s=0.07)
    measured = {}
    for agents in (4, 8, 16, 24, 32):
        alone = Deployment(runners=agents, slots=1, think_s=PAUSE * CALLS, calls=round(CALLS), engines=1, engine=engine)
        rate = predicted(alone, FREE, seconds=4000.0).rollouts_per_s * CALLS
        measured[agents] = {"calls_per_s": rate, "mean_prompt_tokens": 9900.0, "hit_rate": 0.9}
    found = points.speed(ONE_GPU, measured)

    # One of the pauses of an attempt is not between two calls: a twelfth of a pause is counted as the engine's, or not.
    assert found.alone_s == pytest.approx(engine.alone_s, abs=PAUSE / CALLS + 0.02)
    assert found.beside_s == pytest.approx(engine.beside_s, rel=0.1)
    assert found.seats == 40
    assert found.recompute_s == pytest.approx(9900 * 0.9 / ONE_GPU.prefill_tokens_per_s, abs=1e-4)


def test_a_trainer_takes_rollouts_by_batches_and_lets_only_so_many_begin() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        engine = SimulatedEngine(ONE_GPU)
        training = Training(batch=2, step_s=10.0, ahead_steps=1, swap_s=1.0)
        consumer = Consumer(training, [engine])
        trains = asyncio.create_task(consumer.run())
        leaping_clock.leap()
        began_s, begun = loop.time(), list[float]()
        for _ in range(8):
            await consumer.begin()
            begun.append(loop.time() - began_s)
            await consumer.end()
        trains.cancel()
        assert engine.open.is_set()
        return begun

    begun = leaping_clock.run(main())
    # Two steps' rollouts at once, and those of one more with every step of ten seconds and a swap of one.
    assert begun == pytest.approx([0.0, 0.0, 0.0, 0.0, 11.0, 11.0, 22.0, 22.0], abs=0.01)
