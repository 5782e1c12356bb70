"""Ids of responses that a backend stores (`store` of the Responses API), and calls that continue them.

A response is stored by the backend that created it, and any process of the proxy may receive a request for it, so its
id names the backend. The id is signed for the caller's project: the backend knows only the proxy's own key and would
return the response to every project.
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
from fulmen_llm_proxy.backends.call_plan import CallPlan
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.routing.table import Choice, RoutingTable

_MARK = "~"
_DIGEST_BYTES = 10
_NO_KEYS = (b"",)  # development mode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The backend that stores a response, and its id there."""

    backend_id: str
    raw_id: str


class ResponseIds:
    """Signs and verifies the ids that callers see."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Callable[[], Sequence[bytes]]) -> None:
        """Sets the secrets that all processes of a deployment share: the first one signs, all are accepted."""
        self._keys = keys

    def sealed(self, raw_id: str, *, backend_id: str, project: str) -> str:
        """Returns the id for callers of a project."""
        return _MARK.join((raw_id, backend_id, _signature((self._keys() or _NO_KEYS)[0], raw_id, backend_id, project)))

    def opened(self, sealed_id: str, *, project: str) -> StoredResponse | None:
        """Returns the response that an id names; None if it was not signed here for that project."""
        parts = sealed_id.rsplit(_MARK, 2)
        if len(parts) != 3:
            return None
        raw_id, backend_id, signature = parts
        made_here = [_signature(key, raw_id, backend_id, project).encode() for key in self._keys() or _NO_KEYS]
        if not any(hmac.compare_digest(signature.encode(), each) for each in made_here):
            return None
        return StoredResponse(backend_id=backend_id, raw_id=raw_id)


def _signature(secret: bytes, raw_id: str, backend_id: str, project: str) -> str:
    signed = "\0".join((raw_id, backend_id, project)).encode()
    key = hashlib.blake2b(secret, digest_size=32, person=b"response-ids").digest()
    return hashlib.blake2b(signed, digest_size=_DIGEST_BYTES, key=key).hexdigest()


_PREVIOUS, _NOT_FOUND = "previous_response_id", "previous_response_not_found"
_STRING = msgspec.json.Decoder(str | None)


def previous_not_found(given: str) -> Refused:
    """Returns the refusal of a call that continues a response that the caller does not have."""
    message = (
        f"Previous response with id '{given[:200]}' not found: it was not stored, was created elsewhere, was deleted, or has "
        "expired. Send the complete input instead."
    )
    return Refused(400, _NOT_FOUND, message, param=_PREVIOUS)


class StoredResponseRouter:
    """Routes calls that continue a stored response to the backend that stores it."""

    def __init__(self, ids: ResponseIds) -> None:
        self._ids = ids

    def resolve(self, request: CallRequest, project: str) -> tuple[CallRequest, StoredResponse | None]:
        """Returns the request with the backend's own id of the previous response, and that response.

        Raises:
            Refused: if the project has no such response.
        """
        given = read(request.fields, _PREVIOUS, _STRING, None) if request.api.name is ApiName.RESPONSES else None
        if not given:
            return request, None
        kept = self._ids.opened(given, project=project)
        if kept is None:
            raise previous_not_found(given)
        return msgspec.structs.replace(
            request, fields={**request.fields, _PREVIOUS: msgspec.Raw(encode(kept.raw_id))}
        ), kept

    def choice(self, table: RoutingTable, model: str, kept: StoredResponse) -> Choice:
        """Returns the choice of the backend that stores the response.

        Raises:
            RouteNotFound: if the model is not served.
            Refused: if the model's route no longer leads to that backend.
        """
        found = table.pinned(model, kept.backend_id)
        if found is None:
            message = f"The backend that stores the previous response does not serve model '{model[:100]}'."
            raise Refused(400, _NOT_FOUND, message, param=_PREVIOUS)
        return found

    def seal(self, plan: CallPlan, backend_id: str, project: str) -> CallPlan:
        """Returns the plan with signed ids in its answer if the backend stores the response."""
        if plan.api.name is not ApiName.RESPONSES or bytes(plan.fields.get("store", b"")) == b"false":
            return plan
        seal = partial(self._ids.sealed, backend_id=backend_id, project=project)
        return msgspec.structs.replace(plan, reader=SealedReader(plan.reader, seal))
