"""How long a test with a random course lasts: FULMEN_TEST_SOAK times its usual length, on the course of FULMEN_TEST_SEED."""

from __future__ import annotations

import os
import random

__all__ = ["SEED_VARIABLE", "SOAK", "given_seed", "seed"]

SEED_VARIABLE = "FULMEN_TEST_SEED"
SOAK = int(os.environ.get("FULMEN_TEST_SOAK") or 1)


def given_seed() -> int | None:
    """Returns the seed that the environment names, or None."""
    given = os.environ.get(SEED_VARIABLE)
    return int(given) if given else None


def seed(usual: int | None = None) -> int:
    """Returns the seed that the environment names, else the usual one, else a random one."""
    given = given_seed()
    if given is not None:
        return given
    return random.SystemRandom().randrange(2**32) if usual is None else usual
