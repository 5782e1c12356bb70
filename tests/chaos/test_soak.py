"""FULMEN_TEST_SOAK training runs, each with other kills at other points."""

from __future__ import annotations

import random

import pytest

from tests.support.chaos.killed_training import Arena, Kill, train_and_kill
from tests.support.chaos.kills import Victim
from tests.support.soak import SOAK, seed

FIRST_SEED = seed(1)
KILLS = 8
STEPS = 24

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(1800),
    pytest.mark.long,
]


@pytest.mark.parametrize("number", range(FIRST_SEED, FIRST_SEED + SOAK))
async def test_a_run_survives_many_deaths(arena: Arena, number: int) -> None:
    rng = random.Random(number)
    kills = [
        Kill(victim=rng.choice(list(Victim)), step=step) for step in sorted(rng.choices(range(STEPS - 3), k=KILLS))
    ]
    await train_and_kill(arena, f"soak-{number}", kills, steps=STEPS)
