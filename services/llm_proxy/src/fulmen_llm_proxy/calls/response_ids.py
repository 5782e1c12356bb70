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
from functools import partial

import msgspec
import msgspec.structs

from fulmen_llm_proxy.apis.api import ApiName, CallRequest, encode, read
from fulmen_llm_proxy.apis.sealed_responses import SealedReader
from fulmen_llm_proxy.backends.call_plan import Exchange
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.routing.table import Choice, RoutingTable

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


_PREVIOUS = "previous_response_id"
_STRING = msgspec.json.Decoder(str | None)


class ResponseKeeper:
    """Reads and makes the ids of kept responses. Nothing is kept here."""

    def __init__(self, ids: ResponseIds) -> None:
        self._ids = ids

    def continued(self, request: CallRequest, project: str) -> tuple[CallRequest, KeptResponse | None]:
        """Returns the request with the backend's own id of the response that it goes on from, and where that is.

        Raises:
            Refused: if there is no such response for this project.
        """
        given = read(request.fields, _PREVIOUS, _STRING, None) if request.api.name is ApiName.RESPONSES else None
        if not given:
            return request, None
        kept = self._ids.opened(given, project=project)
        if kept is None:
            message = (
                f"There is no response '{given[:200]}' here: the backend that made it keeps none, or it was made "
                "elsewhere. Send the whole input."
            )
            raise Refused(400, "previous_response_not_found", message)
        return msgspec.structs.replace(
            request, fields={**request.fields, _PREVIOUS: msgspec.Raw(encode(kept.raw_id))}
        ), kept

    def choice(self, table: RoutingTable, model: str, kept: KeptResponse) -> Choice:
        """Returns the choice of the backend that keeps the response.

        Raises:
            RouteNotFound: if the model is not served.
            Refused: if the model's route does not lead to that backend any more.
        """
        found = table.pinned(model, kept.backend_id)
        if found is None:
            message = f"The backend that keeps the previous response does not serve the model '{model[:100]}'."
            raise Refused(400, "previous_response_not_found", message)
        return found

    def sealed(self, exchange: Exchange, backend_id: str, project: str) -> Exchange:
        """Returns the exchange with an answer whose ids lead back to its backend, if that keeps it."""
        if exchange.api.name is not ApiName.RESPONSES or bytes(exchange.fields.get("store", b"")) == b"false":
            return exchange
        seal = partial(self._ids.sealed, backend_id=backend_id, project=project)
        return msgspec.structs.replace(exchange, reader=SealedReader(exchange.reader, seal))
