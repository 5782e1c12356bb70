"""Names of span payloads outside the database: by content, under the day of the rollout that they belong to."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.ids import uuid7_unix_ms

__all__ = ["BlobRef", "day_folder", "day_of", "span_folder"]

_SPAN_FOLDER: Final = "spans"
# Of the year 9999, the last day that a date can hold.
_MAX_UNIX_S: Final = 253_402_300_799


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """Where content lies: all that a row keeps of it.

    Attributes:
        digest: The SHA-256 of the content, 32 bytes.
    """

    folder: str
    digest: bytes
    size_bytes: int

    @property
    def key(self) -> str:
        """Its name in the blob storage."""
        return f"{self.folder}/{self.digest.hex()}"


def day_of(rollout_id: UUID) -> datetime.date:
    """Returns the day (UTC) in whose partition the rows of a rollout are."""
    seconds = min(uuid7_unix_ms(rollout_id) // 1000, _MAX_UNIX_S)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()


def day_folder(day: datetime.date) -> str:
    """Returns the folder of all span payloads of a day's rollouts."""
    return f"{_SPAN_FOLDER}/{day:%Y%m%d}"


def span_folder(rollout_id: UUID) -> str:
    """Returns the folder of a rollout's span payloads."""
    return f"{day_folder(day_of(rollout_id))}/{rollout_id}"
