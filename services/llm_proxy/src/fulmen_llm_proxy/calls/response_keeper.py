"""Ties a call of the Responses API to the backend that keeps the response it goes on from."""

from __future__ import annotations

from functools import partial

import msgspec
import msgspec.structs

from fulmen_llm_proxy.apis.api import ApiName, CallRequest, encode, read
from fulmen_llm_proxy.apis.sealed_responses import SealedReader
from fulmen_llm_proxy.backends.call_plan import Exchange
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.response_ids import KeptResponse, ResponseIds
from fulmen_llm_proxy.routing.table import Choice, RoutingTable

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
