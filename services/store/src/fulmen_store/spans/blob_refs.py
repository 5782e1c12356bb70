"""Names of span payloads outside the database: content hashes in a folder per day and rollout."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.ids import uuid7_unix_ms

__all__ = ["BlobRef", "day_folder", "day_of", "span_folder"]

_SPAN_FOLDER: Final = "spans"
# Last second of the year 9999, the maximum of a date.
_MAX_UNIX_S: Final = 253_402_300_799


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """A reference to a blob, stored in the row instead of the content.

    Attributes:
        digest: SHA-256 of the content, 32 bytes.
    """

    folder: str
    digest: bytes
    size_bytes: int

    @property
    def key(self) -> str:
        """Name in the blob storage."""
        return f"{self.folder}/{self.digest.hex()}"


def day_of(rollout_id: UUID) -> datetime.date:
    """Returns the day (UTC) of the partition that holds a rollout's rows."""
    seconds = min(uuid7_unix_ms(rollout_id) // 1000, _MAX_UNIX_S)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()


def day_folder(day: datetime.date) -> str:
    """Returns the folder of all span payloads of a day's rollouts."""
    return f"{_SPAN_FOLDER}/{day:%Y%m%d}"


def span_folder(rollout_id: UUID) -> str:
    """Returns the folder of a rollout's span payloads."""
    return f"{day_folder(day_of(rollout_id))}/{rollout_id}"
