"""Opaque page tokens: the last key of a page, bound to the request."""

from __future__ import annotations

import base64
import binascii
import hashlib

from fulmen.errors import ArgumentInvalid, PageTokenInvalid, Violation

__all__ = ["decode_token", "encode_token", "page_size"]

DIGEST_BYTES = 6
MAX_PAGE = 1000


def encode_token(key: bytes, *, listed: str) -> str:
    """Encodes the last key of a page; `listed` identifies the selection."""
    return base64.urlsafe_b64encode(_digest(listed) + key).decode().rstrip("=")


def decode_token(token: str, *, listed: str, key_bytes: int | None = None) -> bytes | None:
    """Decodes a token into its key, of any length unless one is given; None for the first page.

    Raises:
        PageTokenInvalid: If it is malformed or belongs to another list.
    """
    if not token:
        return None
    try:
        packed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise PageTokenInvalid("The page token is malformed.") from None
    has_length = key_bytes is None or len(packed) == DIGEST_BYTES + key_bytes
    if not has_length or packed[:DIGEST_BYTES] != _digest(listed):
        raise PageTokenInvalid("The page token belongs to another list: start from the first page.")
    return packed[DIGEST_BYTES:]


def page_size(requested: int, *, default: int) -> int:
    """Returns the effective page size, at most 1000.

    Raises:
        ArgumentInvalid: If it is negative.
    """
    if requested < 0:
        raise ArgumentInvalid(
            "The page size is negative.", violations=[Violation(field="page_size", description="is negative")]
        )
    return min(requested or default, MAX_PAGE)


def _digest(listed: str) -> bytes:
    return hashlib.sha256(listed.encode()).digest()[:DIGEST_BYTES]
