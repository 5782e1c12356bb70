"""Storages for segments, and short waits at the end of a watch."""

from __future__ import annotations

import pytest

from fulmen_store.spans import following
from tests.support.object_store import bucket, s3

__all__ = ["bucket", "no_long_linger", "s3"]


@pytest.fixture(autouse=True)
def no_long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a watch soon after the end of what is watched."""
    monkeypatch.setattr(following, "LINGER_S", 0.1)
