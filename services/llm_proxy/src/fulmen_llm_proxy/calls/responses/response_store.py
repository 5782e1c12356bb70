"""Responses that the proxy keeps, in the store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec

from fulmen.errors import PermissionDenied, ProjectNotFound, Unimplemented
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import stored_response_service_pb2 as pb
from fulmen.store.v1 import stored_response_service_pb2_grpc
from fulmen_llm_proxy.apis.api import UNREADABLE, decode_fields
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.calls.request_buffer import BufferShare

MAX_CONTENT_BYTES: Final = 3 * 1024 * 1024
"""The store's limit of the input and the output of one response, bytes."""
MAX_DEPTH: Final = 1000
"""Longest chain of responses."""
MAX_CHAIN_BYTES: Final = 16 * 1024 * 1024
"""Largest chain of responses, bytes of input and output."""

_DEADLINE_S: Final = 5.0
_PUT_DEADLINE_S: Final = 2.0
"""The caller waits for it, with its answer complete."""
_NOT_THERE: Final = (PermissionDenied, ProjectNotFound, Unimplemented)
"""The store has none for this proxy, or is of an earlier version."""
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A stored response.

    Attributes:
        previous_id: id in the store of the one that it continues; empty if it is the first.
        input: its own input items.
        response: the response as its caller got it.
        output: its output items.
        depth: number of responses up to it.
        chain_bytes: bytes of all responses up to it.
    """

    id: str
    previous_id: str
    input: list[msgspec.Raw]
    response: bytes
    output: list[msgspec.Raw]
    depth: int
    chain_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What a call continues.

    Attributes:
        newest: the response that it names.
        fields: the fields that the caller sent.
        share: memory that the conversation holds.
    """

    newest: KeptResponse
    fields: Fields
    share: BufferShare


class ResponseStore:
    """Reads and writes them. A response that cannot be read counts as lost."""

    def __init__(self, channel: FulmenChannel) -> None:
        """Sets the channel, whose token must have the role `service`."""
        self._stub = stored_response_service_pb2_grpc.StoredResponseServiceStub(channel)

    async def put(self, caller: Caller, response: pb.StoredResponse) -> None:
        """Stores a response of a caller.

        Raises:
            FulmenError: if the store does not take it.
        """
        request = pb.PutStoredResponseRequest(project=caller.project, attempt=caller.attempt, response=response)
        attribution = caller.attribution
        if attribution is not None and math.isfinite(attribution.expires_s):
            request.expire_time.seconds = int(attribution.expires_s) + 1
        await self._stub.PutStoredResponse(request, timeout=_PUT_DEADLINE_S)

    async def page(self, caller: Caller, response_id: str, *, max_count: int = 1) -> list[KeptResponse]:
        """Returns a response and some of those before it; none if the caller has no such response.

        Raises:
            FulmenError: if the store does not answer.
        """
        request = pb.GetStoredResponsesRequest(
            project=caller.project, attempt=caller.attempt, id=response_id, max_count=max_count
        )
        try:
            answer = await self._stub.GetStoredResponses(request, timeout=_DEADLINE_S)
        except _NOT_THERE:
            return []
        kept: list[KeptResponse] = []
        for message in answer.responses:
            try:
                kept.append(_kept(message))
            except (*UNREADABLE, KeyError):
                break
        return kept

    async def delete(self, caller: Caller, response_id: str) -> bool:
        """Deletes a response; returns False if the caller has no such response.

        Raises:
            FulmenError: if the store does not answer.
        """
        request = pb.DeleteStoredResponseRequest(project=caller.project, attempt=caller.attempt, id=response_id)
        try:
            answer = await self._stub.DeleteStoredResponse(request, timeout=_DEADLINE_S)
        except _NOT_THERE:
            return False
        return bool(answer.deleted)

    async def earlier(self, caller: Caller, newest: KeptResponse) -> tuple[list[KeptResponse], bool]:
        """Returns the responses that one continues, newest first, and whether all of them exist.

        Raises:
            FulmenError: if the store does not answer.
        """
        found: list[KeptResponse] = []
        at = newest
        while at.previous_id:
            page = await self.page(caller, at.previous_id, max_count=max(1, MAX_DEPTH - len(found)))
            if not page or len(found) >= MAX_DEPTH:
                return found, False
            found += page
            at = page[-1]
        return found, True


def _kept(message: pb.StoredResponse) -> KeptResponse:
    return KeptResponse(
        id=message.id,
        previous_id=message.previous_id,
        input=_ITEMS.decode(message.input_json),
        response=message.response_json,
        output=_ITEMS.decode(decode_fields(message.response_json)["output"]),
        depth=message.depth,
        chain_bytes=message.chain_bytes,
    )


def id_in_store(given: str) -> str:
    """Returns the id in the store of a response, by the one that callers see; empty if it is none of the proxy's."""
    head, _, text = given.partition("_")
    try:
        return UUID(text).hex if head == "resp" and len(text) == 32 else ""
    except ValueError:
        return ""


def id_for_callers(response_id: str) -> str:
    """Returns the id that callers see."""
    return f"resp_{response_id}"
