"""Stored values that cannot be read are counted, and not kept in memory."""

from __future__ import annotations

import sys

from fulmen.store.v1 import rollout_pb2
from fulmen_store.database.stored import read_column, unreadable_columns


def test_a_value_that_cannot_be_read_is_counted_once_and_not_kept() -> None:
    stored = bytes([255]) * 1_000_003
    references, count = sys.getrefcount(stored), unreadable_columns()
    assert read_column(rollout_pb2.Rollout, stored) is None
    assert read_column(rollout_pb2.Rollout, stored) is None
    assert unreadable_columns() == count + 1
    assert sys.getrefcount(stored) == references
