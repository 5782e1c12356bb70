"""`kill -9` of every service in the middle of a training run: it ends, and every rollout counts exactly once."""

from __future__ import annotations

import random

import pytest

from tests.support.chaos.killed_training import Arena, Kill, train_and_kill
from tests.support.chaos.kills import Victim

pytestmark = [pytest.mark.long(short=True), pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

# Another seed is another order and other points; the soak goes through many.
SEED = 20261121


async def test_a_run_survives_the_death_of_everything_around_the_trainer(arena: Arena) -> None:
    rng = random.Random(SEED)
    victims = [Victim.RUNNER, Victim.PROXY, Victim.STORE, Victim.DATABASE]
    rng.shuffle(victims)
    steps = 14
    points = sorted(rng.sample(range(1, steps - 3), len(victims)))
    kills = [Kill(victim=victim, step=step) for victim, step in zip(victims, points, strict=True)]

    aftermath = await train_and_kill(arena, "around", kills, steps=steps)

    # The runner and the proxy were held still with leased rollouts before they died.
    assert aftermath.failures["LEASE_LOST"] > 0
    assert aftermath.failures["INFRA"] > 0


async def test_a_run_survives_the_death_of_the_trainer_between_checkpoints(arena: Arena) -> None:
    """Step 0 is before any checkpoint of a step; after step 3 the newest one is that of step 2."""
    kills = [Kill(victim=Victim.ALGORITHM, step=0), Kill(victim=Victim.ALGORITHM, step=3)]

    await train_and_kill(arena, "trainer", kills, steps=7)


async def test_a_rolling_restart_of_every_service_under_load_loses_nothing(arena: Arena) -> None:
    order = [Victim.STORE, Victim.PROXY, Victim.ALGORITHM, Victim.RUNNER]
    restarts = [Kill(victim=victim, step=2 * place, is_polite=True) for place, victim in enumerate(order, start=1)]

    # There is one of each, and leases are short: an attempt may have to be run again, and none may count for it.
    await train_and_kill(arena, "rolling", restarts, steps=11)
