"""Anthropic messages, passed through byte for byte; usage, stop reason and end are read on the way.

Source: the Messages API of Anthropic, versions 2023-06-01 and 2026-10-21, which answer alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fulmen_llm_proxy.apis.api import (
    ABSENT,
    COUNT,
    FLAG,
    TEXT,
    UNREADABLE,
    ApiName,
    CallRequest,
    Dialect,
    RequestReader,
    encode,
    given,
)
from fulmen_llm_proxy.apis.assembly import JSON, assembled
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields
from fulmen_llm_proxy.apis.sse import event_data


class MessagesApi:
    """`POST /v1/messages`."""

    name = ApiName.MESSAGES
    dialect = Dialect.ANTHROPIC
    path = "/messages"
    operation = "chat"
    generates = True
    is_metered = True
    can_capture = False

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model", "messages"))
        return CallRequest(
            api=self,
            model=reader.get("model", TEXT, ""),
            stream=bool(reader.get("stream", FLAG, None)),
            asked=Asked(stream_usage=True),
            max_tokens=reader.get("max_tokens", COUNT, None),
            fields=reader.check(),
        )

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields unchanged; every stream includes its usage."""
        return encode(fields)

    def reader(self, asked: Asked) -> MessagesReader:
        """Returns a new reader."""
        return MessagesReader()

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Assembles the message of a stream."""
        return assemble_message(payloads)


class _Outline(msgspec.Struct):
    """The fields read of an answer, an event, and the parts of an event."""

    type: str = ""
    stop_reason: str | None = None
    usage: msgspec.Raw = ABSENT
    message: _Outline | None = None
    delta: _Outline | None = None


_OUTLINE = msgspec.json.Decoder(_Outline)


class MessagesReader:
    """Reads one answer on its way to the caller."""

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected = Collected()

    def whole(self, body: bytes) -> bytes:
        """Returns the answer unchanged."""
        collected = self.collected
        collected.payloads.append(body)
        outline = self._outline(body)
        if outline is not None:
            self._note(outline)
            collected.complete = True
        return body

    def event(self, event: bytes) -> bytes:
        """Returns the event unchanged."""
        collected = self.collected
        collected.streamed = True
        data = event_data(event)
        if data is None:
            return event
        collected.payloads.append(data)
        outline = self._outline(data)
        if outline is None:
            return event
        match outline.type:
            case "message_start" if outline.message is not None:
                self._note(outline.message)
            case "message_delta":
                self._note(outline)
                if outline.delta is not None:
                    self._note(outline.delta)
            case "message_stop":
                collected.complete = True
            case "error":
                collected.error = True
        return event

    def end(self) -> bytes:
        """Returns nothing: the stream has its own last event."""
        return b""

    def _outline(self, data: bytes) -> _Outline | None:
        try:
            return _OUTLINE.decode(data)
        except UNREADABLE:
            self.collected.malformed = True
            return None

    def _note(self, part: _Outline) -> None:
        if given(part.usage):
            self.collected.usage.append(part.usage)
        if part.stop_reason is not None:
            self.collected.choice(0).finish_reason = part.stop_reason
        if part.type == "error":
            self.collected.error = True


_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""The field with the piece of a string, by type of delta."""


class _Piece(msgspec.Struct):
    """The fields read of a message, a block or a delta while a stream is assembled."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    citations: list[Any] | None = None
    usage: JSON | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Piece | None = None
    content_block: _Piece | None = None
    delta: _Piece | None = None
    usage: JSON | None = None


def assemble_message(payloads: list[bytes]) -> bytes:
    """Assembles the message of a stream, as JSON."""
    return assembled(payloads, _Event, _built)


def _built(events: Iterator[JSON]) -> JSON:
    message: JSON = {}
    blocks: dict[int, JSON] = {}
    for event in events:
        _add(message, blocks, event)
    if message:
        message["content"] = [_finished(blocks[index]) for index in sorted(blocks)]
    return message


def _add(message: JSON, blocks: dict[int, JSON], event: JSON) -> None:
    match event:
        case {"type": "message_start", "message": dict(start)}:
            message |= start
        case {"type": "content_block_start", "index": int(index), "content_block": dict(block)}:
            blocks[index] = block
        case {"type": "content_block_delta", "index": int(index), "delta": dict(delta)} if index in blocks:
            _add_delta(blocks[index], delta)
        case {"type": "message_delta"}:
            _add_end(message, event)


def _add_delta(block: JSON, delta: JSON) -> None:
    kind = delta.get("type")
    field = _PIECES.get(kind or "")
    if field is not None:
        block[field] = (block.get(field) or "") + (delta.get(field) or "")
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]


def _add_end(message: JSON, event: JSON) -> None:
    message |= event.get("delta") or {}
    reported = {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
    message["usage"] = {**(message.get("usage") or {}), **reported}
    message |= {key: value for key, value in event.items() if key not in ("type", "delta", "usage", "message")}


def _finished(block: JSON) -> JSON:
    """Decodes the joined pieces of a tool's input; invalid JSON stays text."""
    pieces = block.pop("partial_json", None)
    if pieces:
        try:
            block["input"] = msgspec.json.decode(pieces)
        except (*UNREADABLE, UnicodeEncodeError):
            block["input"] = pieces
    return block
