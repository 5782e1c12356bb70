"""Anthropic messages: passed through byte for byte; usage, stop reason and the end are read on the way.

Source: the Messages API of Anthropic, versions 2023-06-01 and 2026-10-21, which answer alike.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import (
    ABSENT,
    COUNT,
    FLAG,
    TEXT,
    ApiName,
    CallRequest,
    Dialect,
    RequestReader,
    encode,
    given,
)
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields
from fulmen_llm_proxy.apis.messages_assembly import assemble_message
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
        """Reads a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model", "messages"))
        return CallRequest(
            api=self,
            model=reader.take("model", TEXT, ""),
            stream=bool(reader.take("stream", FLAG, None)),
            asked=Asked(stream_usage=True),
            max_tokens=reader.take("max_tokens", COUNT, None),
            fields=reader.check(),
        )

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields as they are; every stream brings its usage by itself."""
        return encode(fields)

    def reader(self, asked: Asked) -> MessagesReader:
        """Returns a new reader."""
        return MessagesReader()

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Returns the message of a stream's events."""
        return assemble_message(payloads)


class _Outline(msgspec.Struct):
    """What is read of an answer, of an event, and of the parts of an event."""

    type: str = ""
    stop_reason: str | None = None
    usage: msgspec.Raw = ABSENT
    message: _Outline | None = None
    delta: _Outline | None = None


_OUTLINE = msgspec.json.Decoder(_Outline)


class MessagesReader:
    """Reads an answer on its way; one object per call."""

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected = Collected()

    def whole(self, body: bytes) -> bytes:
        """Returns the whole answer as it is."""
        collected = self.collected
        collected.payloads.append(body)
        outline = self._outline(body)
        if outline is not None:
            self._note(outline)
            collected.complete = True
        return body

    def event(self, event: bytes) -> bytes:
        """Returns one event of a stream as it is."""
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
        """Returns nothing: the stream ends with its own last event."""
        return b""

    def _outline(self, data: bytes) -> _Outline | None:
        try:
            return _OUTLINE.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.collected.malformed = True
            return None

    def _note(self, part: _Outline) -> None:
        if given(part.usage):
            self.collected.usage.append(part.usage)
        if part.stop_reason is not None:
            self.collected.choice(0).finish_reason = part.stop_reason
        if part.type == "error":
            self.collected.error = True
