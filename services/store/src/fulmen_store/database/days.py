"""Days of rollouts: spans are in a partition for each, and statements name the days that they need.

The bounds are constants of the statement. PostgreSQL leaves the other days out when it plans, and then opens and locks the same
few tables however many days are kept; with parameters it would lock every day, and look at them while it runs.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen.ids import uuid7_unix_ms

__all__ = ["day_of", "days_condition", "first_id", "require_partitions"]

DAY_MS: Final = 86_400_000
# Last second of the year 9999, the maximum of a date.
_MAX_UNIX_S: Final = 253_402_300_799
_RANDOM_BITS: Final = 80
_MAX_UNIX_MS: Final = 2**48 - 1


def day_of(rollout_id: UUID) -> datetime.date:
    """Returns the day (UTC) of the partition that holds a rollout's spans."""
    seconds = min(uuid7_unix_ms(rollout_id) // 1000, _MAX_UNIX_S)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()


def first_id(unix_ms: int) -> UUID:
    """Returns the lower bound of the UUIDv7s of a moment, Unix milliseconds; of the first or last one that they can hold."""
    return UUID(int=min(max(unix_ms, 0), _MAX_UNIX_MS) << _RANDOM_BITS)


def days_condition(rollout_ids: Iterable[UUID]) -> str:
    """Returns the condition, in SQL, that `q.rollout_id` is of the day of one of these rollouts."""
    days = sorted({uuid7_unix_ms(each) // DAY_MS for each in rollout_ids})
    ranges = [
        f"q.rollout_id >= '{first_id(day * DAY_MS)}' and q.rollout_id < '{first_id((day + 1) * DAY_MS)}'"
        for day in days
    ]
    return f"({' or '.join(ranges)})" if ranges else "false"


def require_partitions(rows: Iterable[Mapping[str, Any]]) -> None:
    """Checks the rows of a statement that creates partitions of days.

    Raises:
        DatabaseUnavailable: If one does not exist, because another session changes the table of all days.
    """
    if not all(row["is_there"] for row in rows):
        raise DatabaseUnavailable("The table of a day's spans cannot be created now: another session changes it.")
