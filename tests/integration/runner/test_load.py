"""A runner reports the load of its machine, also while it reports attempts."""

from __future__ import annotations

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of
from tests.support.runner.stores import FINAL_TIMEOUT_S


async def test_the_load_comes_with_the_renewals(world: World) -> None:
    await world.start()
    # Each ends at once, so that there is always a report to send.
    await world.store.create(rollouts_of("", [{} for _ in range(200)]))
    await world.double.until(lambda: len(world.double.loads) >= 2, FINAL_TIMEOUT_S)
    for load in world.double.loads:
        assert 0.0 <= load.cpu_ratio <= 1.0
        assert 0 < load.memory_bytes < load.memory_limit_bytes
