"""A runner tells the store how busy its machine is, also when it has other things to say."""

from __future__ import annotations

from tests.support.runner.fixtures import StartRunner
from tests.support.runner.harness import rollouts_of
from tests.support.runner.stores import FINAL_DEADLINE_S, DoubleStore


async def test_the_load_comes_with_the_renewals(store: DoubleStore, start_runner: StartRunner) -> None:
    await start_runner()
    # Each ends at once, so that there is always a report to send.
    await store.create(rollouts_of("", [{} for _ in range(200)]))
    await store.double.until(lambda: len(store.double.loads) >= 2, FINAL_DEADLINE_S)
    for load in store.double.loads:
        assert 0.0 <= load.cpu_ratio <= 1.0
        assert 0 < load.memory_bytes < load.memory_limit_bytes
