"""A store on a fresh database, and a console of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.console import Browser, console_of
from tests.support.store.fixtures import store, store_settings, stubs
from tests.support.store.running import StoreHandle

__all__ = ["store", "store_settings", "stubs"]


@pytest.fixture
async def browser(store: StoreHandle) -> AsyncIterator[Browser]:
    """Yields a client of a console."""
    async with console_of(store) as opened:
        yield opened
