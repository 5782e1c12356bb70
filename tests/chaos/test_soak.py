"""The long form: many runs, each with other kills at other points. `make chaos`, or FULMEN_TEST_SOAK=<runs>."""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos.conftest import SOAK_VARIABLE, Arena
from tests.chaos.harm import Kill, train_and_kill
from tests.support.kills import Victim

RUNS = int(os.environ.get(SOAK_VARIABLE, "0"))
FIRST_SEED = int(os.environ.get("FULMEN_TEST_SOAK_SEED", "1"))
KILLS = 8
STEPS = 24

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
async def test_a_run_survives_many_deaths(arena: Arena, seed: int) -> None:
    rng = random.Random(seed)
    kills = [
        Kill(victim=rng.choice(list(Victim)), step=step) for step in sorted(rng.choices(range(STEPS - 3), k=KILLS))
    ]
    await train_and_kill(arena, f"soak-{seed}", kills, steps=STEPS)
