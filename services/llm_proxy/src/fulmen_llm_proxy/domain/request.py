"""The agent's request as fields, and the request that the backend gets in its place.

Invariant: fields that the proxy does not name pass through byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.domain.answer import Asked, Fields

PROTECTED_FIELDS = frozenset({"model", "messages", "stream", "stream_options", "return_token_ids", "logprobs"})
"""Fields that a route may not override: they are the caller's, or the capture's."""

_FIELDS = msgspec.json.Decoder(Fields)
_ENCODER = msgspec.json.Encoder()
_TRUE = msgspec.Raw(b"true")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Outline(msgspec.Struct):
    """The fields that the proxy reads, with their types; all others are skipped."""

    model: str
    messages: msgspec.Raw
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    logprobs: bool | None = None


_OUTLINE = msgspec.json.Decoder(_Outline)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One chat completion request, its outline read and its fields kept as slices."""

    model: str
    stream: bool
    asked: Asked
    fields: Fields


def parse_chat_request(body: bytes) -> ChatRequest:
    """Reads the outline of a chat completion request.

    Raises:
        ArgumentInvalid: if the body is not JSON, or a field that the proxy reads has a wrong type.
    """
    try:
        outline = _OUTLINE.decode(body)
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        # The message of msgspec names the place and the type, never the content.
        raise ArgumentInvalid(f"The request is not a chat completion request: {error}.") from None
    options = outline.stream_options
    return ChatRequest(
        model=outline.model,
        stream=bool(outline.stream),
        asked=Asked(
            token_ids=bool(outline.return_token_ids),
            logprobs=bool(outline.logprobs),
            stream_usage=bool(options and options.include_usage),
        ),
        fields=fields,
    )


def routed_fields(request: ChatRequest, *, model: str, overrides: Mapping[str, msgspec.Raw]) -> Fields:
    """Returns the request's fields with the backend's model name and the route's overrides."""
    fields = {**request.fields, **overrides}
    if model != request.model:
        fields["model"] = msgspec.Raw(_ENCODER.encode(model))
    return fields


def backend_body(fields: Fields, *, stream: bool, capture: bool) -> bytes:
    """Returns the body for the backend: the routed fields, and what the capture adds to them."""
    if not capture:
        return _ENCODER.encode(fields)
    asked = {**fields, "return_token_ids": _TRUE, "logprobs": _TRUE}
    if stream:
        asked["stream_options"] = _with_usage(fields.get("stream_options"))
    return _ENCODER.encode(asked)


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    fields: Fields = {}
    if options is not None and bytes(options) != b"null":
        fields = _FIELDS.decode(options)
    fields["include_usage"] = _TRUE
    return msgspec.Raw(_ENCODER.encode(fields))


def parse_overrides(text: str) -> Fields:
    """Reads the JSON object of a route's sampling overrides.

    Raises:
        ArgumentInvalid: if it is not a JSON object, or names a field that a route may not set.
    """
    if not text:
        return {}
    try:
        fields = _FIELDS.decode(text.encode())
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ArgumentInvalid(f"Sampling overrides must be a JSON object: {error}.") from None
    refused = sorted(PROTECTED_FIELDS & fields.keys())
    if refused:
        raise ArgumentInvalid(f"A route may not override: {', '.join(refused)}.")
    return fields
