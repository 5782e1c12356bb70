"""A fresh database per test, and a store on it."""

from tests.integration.store.conftest import database_url, store, stubs

__all__ = ["database_url", "store", "stubs"]
