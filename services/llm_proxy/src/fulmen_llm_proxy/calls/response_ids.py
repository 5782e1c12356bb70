"""Ids of responses that a backend keeps, as callers see them.

A response lives at the backend that made it, and any process of the proxy may be asked for it: so
its id says where it lives. It is signed for the project of its caller, since the backend knows the
proxy's key only and would show it to everybody.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MARK = "~"
_DIGEST_BYTES = 10
_NO_KEYS = (b"",)  # of a proxy in development mode


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """Where a response is, and its id there."""

    backend_id: str
    raw_id: str


class ResponseIds:
    """Makes ids for callers, and reads them."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Callable[[], Sequence[bytes]]) -> None:
        """Takes the secrets that all processes of a deployment share: the first signs, all of them are accepted."""
        self._keys = keys

    def sealed(self, raw_id: str, *, backend_id: str, project: str) -> str:
        """Returns the id for a caller of that project."""
        return _MARK.join((raw_id, backend_id, _signature((self._keys() or _NO_KEYS)[0], raw_id, backend_id, project)))

    def opened(self, sealed_id: str, *, project: str) -> KeptResponse | None:
        """Returns what an id says; None if it was not made here for that project."""
        parts = sealed_id.rsplit(_MARK, 2)
        if len(parts) != 3:
            return None
        raw_id, backend_id, signature = parts
        made_here = [_signature(key, raw_id, backend_id, project).encode() for key in self._keys() or _NO_KEYS]
        if not any(hmac.compare_digest(signature.encode(), each) for each in made_here):
            return None
        return KeptResponse(backend_id=backend_id, raw_id=raw_id)


def _signature(secret: bytes, raw_id: str, backend_id: str, project: str) -> str:
    signed = "\0".join((raw_id, backend_id, project)).encode()
    key = hashlib.blake2b(secret, digest_size=32, person=b"response-ids").digest()
    return hashlib.blake2b(signed, digest_size=_DIGEST_BYTES, key=key).hexdigest()
