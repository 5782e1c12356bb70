"""Deaths of the trainer between checkpoints, and a rolling restart: the run ends, and every rollout counts exactly once.

Deaths of all around the trainer are in `test_crash_matrix.py`; many in one run are in `test_soak.py`.
"""

from __future__ import annotations

import pytest

from tests.support.chaos.killed_training import Arena, Kill, train_and_kill
from tests.support.chaos.kills import Victim

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


async def test_a_run_survives_the_death_of_the_trainer_between_checkpoints(arena: Arena) -> None:
    """Step 0 is before any checkpoint of a step; after step 3 the newest one is that of step 2."""
    kills = [Kill(victim=Victim.ALGORITHM, step=0), Kill(victim=Victim.ALGORITHM, step=3)]

    await train_and_kill(arena, "trainer", kills, steps=7)


async def test_a_rolling_restart_of_every_service_under_load_loses_nothing(arena: Arena) -> None:
    order = [Victim.STORE, Victim.PROXY, Victim.ALGORITHM, Victim.RUNNER]
    restarts = [Kill(victim=victim, step=2 * place, is_polite=True) for place, victim in enumerate(order, start=1)]

    # There is one of each, and leases are short: an attempt may have to be run again, and none may count for it.
    await train_and_kill(arena, "rolling", restarts, steps=11)
