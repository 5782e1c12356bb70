"""Encrypts small values with keys derived from a list of secret lines: AES-256-GCM, one derived key per line.

Invariant: a sealed value opens only with the same label, line and `about`, so that it cannot be moved to another place.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["ANSWERS_LABEL", "BACKEND_KEYS_LABEL", "KEY_ID_BYTES", "SECRETS_LABEL", "CannotOpen", "Sealer"]

SECRETS_LABEL: Final = b"fulmen secrets"
"""Of secrets in the database; lines are the store's signing keys."""

BACKEND_KEYS_LABEL: Final = b"fulmen backend keys"
"""Of backends' keys on their way to the proxy; lines are the secrets of attempt keys."""

ANSWERS_LABEL: Final = b"fulmen cached answers"
"""Of answers in a cache that proxies share; lines are the secrets of attempt keys."""

KEY_ID_BYTES: Final = 8
_NONCE_BYTES: Final = 12
_KEY_ID_LABEL: Final = b"key id"


class CannotOpen(Exception):
    """A value was sealed with another key, for another place, or was changed."""


class Sealer:
    """Seals with the first line, opens with any. A sealed value is key id, nonce and ciphertext."""

    def __init__(self, lines: Callable[[], tuple[bytes, ...]], label: bytes) -> None:
        """Initializes the sealer.

        Args:
            lines: Returns the current lines, the same object until they change; see `SigningKeys.accepted`.
            label: What is sealed; other labels give other keys.
        """
        self._lines = lines
        self._label = label
        self._derived_from: tuple[bytes, ...] | None = None
        self._ciphers: dict[bytes, _Cipher] = {}

    @property
    def key_id(self) -> bytes:
        """Id of the key that seals, `KEY_ID_BYTES` long."""
        return next(iter(self._current()))

    @property
    def older_key_ids(self) -> tuple[bytes, ...]:
        """Ids of the keys that only open."""
        return tuple(self._current())[1:]

    def seal(self, value: bytes, *, about: str) -> bytes:
        """Returns the sealed value, bound to a description of its place."""
        key_id, cipher = next(iter(self._current().items()))
        nonce = os.urandom(_NONCE_BYTES)
        return key_id + nonce + cipher.encrypt(nonce, value, about.encode())

    def open(self, sealed: bytes, *, about: str) -> bytes:
        """Returns the value.

        Raises:
            CannotOpen: If it was not sealed with one of the lines for this place.
        """
        cipher = self._current().get(sealed[:KEY_ID_BYTES])
        nonce, text = sealed[KEY_ID_BYTES : KEY_ID_BYTES + _NONCE_BYTES], sealed[KEY_ID_BYTES + _NONCE_BYTES :]
        if cipher is None or len(nonce) < _NONCE_BYTES:
            raise CannotOpen
        return cipher.decrypt(nonce, text, about.encode())

    def _current(self) -> dict[bytes, _Cipher]:
        lines = self._lines()
        if lines is not self._derived_from:
            keys = [hmac.digest(line, self._label, "sha256") for line in lines]
            self._ciphers = {hmac.digest(key, _KEY_ID_LABEL, "sha256")[:KEY_ID_BYTES]: _Cipher(key) for key in keys}
            self._derived_from = lines
        return self._ciphers


class _Cipher:
    """AES-256-GCM with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @cached_property
    def _aead(self) -> AESGCM:
        # 7 MB per process, which one that seals and opens nothing never needs.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)

    def encrypt(self, nonce: bytes, text: bytes, about: bytes) -> bytes:
        return self._aead.encrypt(nonce, text, about)

    def decrypt(self, nonce: bytes, text: bytes, about: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag  # as above

        try:
            return self._aead.decrypt(nonce, text, about)
        except InvalidTag:
            raise CannotOpen from None
