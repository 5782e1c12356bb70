"""A store on a fresh database, and programs that are started as they are deployed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.forked import started_as_usual
from tests.support.store.fixtures import store, store_settings, stubs

__all__ = ["store", "store_settings", "stubs"]


@pytest.fixture(scope="module", autouse=True)
def usual() -> Iterator[None]:
    """Has no program forked: attackers look into what /proc shows of its start."""
    with started_as_usual():
        yield
