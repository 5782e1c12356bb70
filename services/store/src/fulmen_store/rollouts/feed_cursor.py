"""Positions in the completion feed, and the opaque text in which clients keep them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from fulmen.errors import CursorInvalid

__all__ = [
    "Cursor",
    "Selected",
    "Selection",
]

VERSION: Final = 1


LOWEST_ID: Final = UUID(int=0)


_LAYOUT: Final = struct.Struct(">B4sQ16s")


class Selected(Protocol):
    """What a watcher follows."""

    def digest(self) -> bytes:
        """Returns 4 bytes that identify it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The groups that a watcher follows: those of a project or training run, or one group."""

    project_id: int
    run_id: int | None = None
    group_key: UUID | None = None

    def digest(self) -> bytes:
        """Returns 4 bytes that identify the selection."""
        group = "" if self.group_key is None else f"/{self.group_key}"
        return hashlib.sha256(f"{self.project_id}/{self.run_id}{group}".encode()).digest()[:4]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cursor:
    """A position in the feed, or among changes: just after the row with this transaction id and rollout."""

    xid: int = 0
    rollout_id: UUID = LOWEST_ID

    def encode(self, selection: Selected) -> str:
        """Packs the cursor into the opaque text that clients keep."""
        packed = _LAYOUT.pack(VERSION, selection.digest(), self.xid, self.rollout_id.bytes)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @staticmethod
    def decode(text: str, selection: Selected) -> Cursor:
        """Unpacks a client's cursor; empty text is the beginning.

        Raises:
            CursorInvalid: If it is malformed or belongs to another selection.
        """
        if not text:
            return Cursor()
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            version, digest, xid, rollout = _LAYOUT.unpack(packed)
        except (binascii.Error, ValueError, struct.error):
            raise CursorInvalid("The cursor is malformed.") from None
        if version != VERSION or digest != selection.digest() or xid >= 2**63:
            raise CursorInvalid("The cursor belongs to another selection.")
        return Cursor(xid=xid, rollout_id=UUID(bytes=rollout))
