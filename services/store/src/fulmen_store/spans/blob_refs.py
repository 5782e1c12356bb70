"""Names of span payloads outside the database: content hashes in a folder per day and rollout."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen_store.database.days import day_of

__all__ = ["BlobRef", "day_folder", "span_folder"]

_SPAN_FOLDER: Final = "spans"


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


def day_folder(day: datetime.date) -> str:
    """Returns the folder of all span payloads of a day's rollouts."""
    return f"{_SPAN_FOLDER}/{day:%Y%m%d}"


def span_folder(rollout_id: UUID) -> str:
    """Returns the folder of a rollout's span payloads."""
    return f"{day_folder(day_of(rollout_id))}/{rollout_id}"
