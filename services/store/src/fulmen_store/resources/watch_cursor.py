"""Selections and cursors of watches of resources."""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from fulmen.errors import CursorInvalid, Violation
from fulmen_store.malformed import malformed_request
from fulmen_store.resources.versions import Alias

__all__ = [
    "WatchSelection",
    "WatchedChange",
    "decode_cursor",
]

MAX_KINDS: Final = 64


MAX_PREFIX: Final = 128


CURSOR_VERSION: Final = 1


_LAYOUT: Final = struct.Struct(">B8sQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSelection:
    """The resources that a watcher follows; no kinds means all."""

    project_id: int
    kinds: tuple[str, ...] = ()
    id_prefix: str = ""

    def check(self) -> None:
        """Checks the size of the selection.

        Raises:
            ArgumentInvalid: If there are too many kinds, or the prefix is too long.
        """
        problems = []
        if len(self.kinds) > MAX_KINDS:
            problems.append(Violation(field="kinds", description=f"has more than {MAX_KINDS} entries"))
        if len(self.id_prefix) > MAX_PREFIX:
            problems.append(Violation(field="id_prefix", description=f"is longer than {MAX_PREFIX} characters"))
        if problems:
            raise malformed_request(problems)

    def digest(self) -> bytes:
        """Returns 8 bytes that identify the selection."""
        text = "\0".join([str(self.project_id), self.id_prefix, *sorted(set(self.kinds))])
        return hashlib.sha256(text.encode()).digest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedChange:
    """A new version, or a move of an alias if `alias` is set.

    Attributes:
        transaction: Id of the transaction that wrote it.
        sent_bytes: Upper bound of its size in a message.
    """

    transaction: int
    resource_id: int
    version: int
    sent_bytes: int
    alias: Alias | None = None

    @property
    def position(self) -> tuple[int, int, int, str]:
        """Sort key of the change."""
        return self.transaction, self.resource_id, self.version, self.alias.alias if self.alias else ""


def decode_cursor(text: str, selection: WatchSelection) -> int:
    """Returns the transaction below which everything was sent.

    Raises:
        CursorInvalid: If the cursor is malformed or of another selection.
    """
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        version, digest, transaction = _LAYOUT.unpack(packed)
    except (binascii.Error, ValueError, struct.error):
        raise CursorInvalid("The cursor is malformed.") from None
    if version != CURSOR_VERSION or digest != selection.digest():
        raise CursorInvalid("The cursor belongs to another selection.")
    return int(transaction)
