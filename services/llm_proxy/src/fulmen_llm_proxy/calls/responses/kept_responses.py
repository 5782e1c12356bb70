"""Stores responses of backends that store none, and continues them.

A call that continues a response becomes one with the whole conversation before it is planned, so that guards, limits, the
backend and the capture see what they would see if the caller had sent it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec
import msgspec.structs
import structlog

from fulmen.errors import FulmenError
from fulmen.ids import uuid7
from fulmen.store.v1 import stored_response_service_pb2 as pb
from fulmen_llm_proxy.apis.api import ApiName, encode, read
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.apis.kept_responses import KeptReader
from fulmen_llm_proxy.backends.call_plan import CallPlan
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.request_buffer import RequestBuffer
from fulmen_llm_proxy.calls.responses.response_ids import previous_not_found
from fulmen_llm_proxy.calls.responses.response_store import (
    MAX_CHAIN_BYTES,
    MAX_CONTENT_BYTES,
    MAX_DEPTH,
    Continued,
    ResponseStore,
    id_for_callers,
    id_in_store,
)
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.metrics.responses import ResponseMetrics

_PREVIOUS: Final = "previous_response_id"
_STRING = msgspec.json.Decoder(str | None)
_INPUT = msgspec.json.Decoder(str | list[msgspec.Raw] | None)
_TRUE, _FALSE = b"true", b"false"

_log = structlog.get_logger(__name__)


class Keeping(StrEnum):
    """Which responses are stored."""

    UNLESS_FALSE = "unless_false"
    IF_TRUE = "if_true"
    NEVER = "never"


class KeptResponses:
    """Stores and continues responses as the pipeline needs it."""

    def __init__(
        self, store: ResponseStore, *, keeping: Keeping, buffer: RequestBuffer, metrics: ResponseMetrics
    ) -> None:
        """Sets the store, and the memory for bodies of requests, which holds conversations, too."""
        self._store = store
        self._keeping = keeping
        self._buffer = buffer
        self._metrics = metrics

    async def resume(self, call: RunningCall) -> None:
        """Puts the conversation of the response that a call continues before its input, if the proxy keeps it.

        Raises:
            Refused: if the caller has no such response, or there is no memory for its conversation.
            FulmenError: if the store does not answer.
        """
        fields = call.request.fields
        given = read(fields, _PREVIOUS, _STRING, None) or ""
        response_id = id_in_store(given)
        if not response_id:
            return
        page = await self._store.page(call.caller, response_id)
        if not page:
            raise previous_not_found(given)
        share = self._buffer.share()
        call.continued = Continued(newest=page[0], fields=fields, share=share)
        share.reserve(page[0].chain_bytes)
        earlier, is_whole = await self._store.earlier(call.caller, page[0])
        if not is_whole:
            raise previous_not_found(given)
        items = [item for each in (*reversed(earlier), page[0]) for item in (*each.input, *each.output)]
        whole = {name: raw for name, raw in fields.items() if name != _PREVIOUS}
        whole["input"] = msgspec.Raw(encode([*items, *input_items(fields)]))
        call.request = call.permit.request = msgspec.structs.replace(call.request, fields=whole)
        call.affinity = call.affinity.of(whole)
        call.size_bytes += page[0].chain_bytes

    def plan(self, call: RunningCall, plan: CallPlan) -> CallPlan:
        """Returns the plan with a reader that stores the response, if it is to be stored here.

        Raises:
            Refused: if it is to be stored and cannot be.
        """
        if plan.api.name is ApiName.RESPONSES:
            return plan  # the backend stores it
        keeps, continued = self._keeps(call), call.continued
        if not keeps and continued is None:
            return plan
        reader = KeptReader(
            plan.reader,
            response_id=id_for_callers(uuid7().hex) if keeps else "",
            previous_id="" if continued is None else id_for_callers(continued.newest.id),
        )
        return msgspec.structs.replace(plan, reader=reader)

    async def finish(self, call: RunningCall, reader: KeptReader) -> bytes:
        """Stores the response that a reader holds back, and returns the answer or last event.

        A response that cannot be stored is returned with `store` false.
        """
        response = reader.held
        if response is None:
            return b""
        continued = call.continued
        own = encode(input_items(call.request.fields if continued is None else continued.fields))
        if len(own) + len(response) > MAX_CONTENT_BYTES:
            self._metrics.ended("too_large")
            return reader.release(stored=False)
        message = pb.StoredResponse(
            id=id_in_store(reader.response_id),
            previous_id="" if continued is None else continued.newest.id,
            input_json=own,
            response_json=response,
        )
        try:
            await self._store.put(call.caller, message)
        except FulmenError as error:
            _log.warning("response_not_stored", reason=error.reason)
            self._metrics.ended("failed")
            return reader.release(stored=False)
        self._metrics.ended("stored")
        return reader.release(stored=True)

    def _keeps(self, call: RunningCall) -> bool:
        """Returns whether the response of a call is to be stored.

        Raises:
            Refused: if the caller requires storage and the conversation is too large.
        """
        asked = bytes(call.request.fields.get("store", b""))
        if self._keeping is Keeping.NEVER or asked == _FALSE:
            return False
        if asked != _TRUE and self._keeping is Keeping.IF_TRUE:
            return False
        continued = call.continued
        if continued is None:
            fits = len(call.request.fields.get("input", b"")) <= MAX_CONTENT_BYTES
            depth = chain_bytes = 0
        else:
            own_bytes = len(continued.fields.get("input", b""))
            fits = own_bytes <= MAX_CONTENT_BYTES
            depth, chain_bytes = continued.newest.depth, continued.newest.chain_bytes + own_bytes
        if fits and depth < MAX_DEPTH and chain_bytes <= MAX_CHAIN_BYTES:
            return True
        if continued is None and asked != _TRUE:
            return False
        raise Refused(
            400,
            "stored_response_too_large",
            f"The response cannot be stored: input and output may have {MAX_CONTENT_BYTES} bytes, and a conversation "
            f"{MAX_DEPTH} responses of {MAX_CHAIN_BYTES} bytes. Send the complete input with `store` false.",
            param="store",
        )


def input_items(fields: Fields) -> list[msgspec.Raw]:
    """Returns the input items of a request; a text is the message of a user.

    Raises:
        ArgumentInvalid: if the input is neither text nor a list.
    """
    said = read(fields, "input", _INPUT, None)
    if isinstance(said, str):
        return [msgspec.Raw(encode({"type": "message", "role": "user", "content": said}))]
    return said or []
