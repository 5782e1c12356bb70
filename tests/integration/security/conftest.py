"""A store on a fresh database."""

from __future__ import annotations

from tests.support.store.fixtures import store, store_settings, stubs

__all__ = ["store", "store_settings", "stubs"]
