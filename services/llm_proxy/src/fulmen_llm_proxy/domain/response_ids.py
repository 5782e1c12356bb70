"""Ids of responses that a backend keeps, as callers see them.

A response lives at the backend that made it, and any process of the proxy may be asked for it: so
its id says where it lives. It is signed for the project of its caller, since the backend knows the
proxy's key only and would show it to everybody.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

_MARK = "~"
_DIGEST_BYTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """Where a response is, and its id there."""

    backend_id: str
    raw_id: str


class ResponseIds:
    """Makes ids for callers, and reads them."""

    __slots__ = ("_key",)

    def __init__(self, secret: str) -> None:
        """Takes a secret that all processes of a deployment share."""
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"response-ids").digest()

    def sealed(self, raw_id: str, *, backend_id: str, project: str) -> str:
        """Returns the id for a caller of that project."""
        return _MARK.join((raw_id, backend_id, self._signature(raw_id, backend_id, project)))

    def opened(self, sealed_id: str, *, project: str) -> KeptResponse | None:
        """Returns what an id says; None if it was not made here for that project."""
        parts = sealed_id.rsplit(_MARK, 2)
        if len(parts) != 3:
            return None
        raw_id, backend_id, signature = parts
        expected = self._signature(raw_id, backend_id, project)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            return None
        return KeptResponse(backend_id=backend_id, raw_id=raw_id)

    def _signature(self, raw_id: str, backend_id: str, project: str) -> str:
        signed = "\0".join((raw_id, backend_id, project)).encode()
        return hashlib.blake2b(signed, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()
