"""How long tests with a random course last, and how many examples tests of properties try: FULMEN_TEST_SOAK times as long as usual, with the seed FULMEN_TEST_SEED."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["SEED_VARIABLE", "SOAK", "given_seed", "long_after", "long_but", "seed"]

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


def long_after(first: int, values: Iterable[Any], *, short: bool = False) -> list[Any]:
    """Returns the values as parameters of a test, all after the first few marked long(short=short)."""
    long = pytest.mark.long(short=short)
    return [value if place < first else pytest.param(value, marks=long) for place, value in enumerate(values)]


def long_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the cases of a matrix as parameters of a test, those marked long that are not kept.

    A tuple has the values of one case. What is kept runs where the test does: in `make test`, or in the short form.
    """
    cases = list(values)
    assert all(case in cases for case in kept), "what is kept is a case"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.long)
        for case in cases
    ]
