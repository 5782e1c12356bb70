"""OpenAI responses, passed through to a backend that serves them and translated for others.

Invariant: events pass byte for byte. Of a stream only the first event, the finished items and the last event are kept,
from which the complete answer can be assembled.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import (
    COUNT,
    FLAG,
    NULL,
    TEXT,
    UNREADABLE,
    ApiName,
    CallRequest,
    Dialect,
    RequestReader,
    encode,
)
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields
from fulmen_llm_proxy.apis.sse import DONE, event_data

_FAILED = "response.failed"
_LAST = frozenset({"response.completed", "response.incomplete", _FAILED})
_ITEM_DONE = "response.output_item.done"
_KEPT = frozenset({"response.created", _ITEM_DONE, "error"}) | _LAST


class _Event(msgspec.Struct):
    type: str = ""
    sequence_number: int = 0
    response: msgspec.Raw = NULL


class _Answer(msgspec.Struct):
    status: str | None = None
    usage: msgspec.Raw = NULL


class _Outline(msgspec.Struct):
    type: str
    response: Fields | None = None
    item: msgspec.Raw = NULL
    output_index: int = 0


_EVENT = msgspec.json.Decoder(_Event)
_ANSWER = msgspec.json.Decoder(_Answer)
_OUTLINE = msgspec.json.Decoder(_Outline)


class ResponsesApi:
    """`POST /v1/responses`."""

    name = ApiName.RESPONSES
    dialect = Dialect.OPENAI
    path = "/responses"
    operation = "generate_content"
    generates = True
    is_metered = True
    can_capture = False

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model",))
        return CallRequest(
            api=self,
            model=reader.get("model", TEXT, ""),
            stream=bool(reader.get("stream", FLAG, None)),
            asked=Asked(),
            max_tokens=reader.get("max_output_tokens", COUNT, None),
            fields=reader.check(),
        )

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields unchanged."""
        return encode(fields)

    def reader(self, asked: Asked) -> ResponsesReader:
        """Returns a new reader."""
        return ResponsesReader()

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Assembles the `response` object of a stream: the last event's, unless the stream broke off."""
        answer: Fields = {}
        items: dict[int, msgspec.Raw] = {}
        for payload in payloads:
            try:
                event = _OUTLINE.decode(payload)
            except UNREADABLE:
                continue  # the call is already marked as malformed
            if event.response is not None:
                answer = event.response
                if event.type in _LAST:
                    return encode(answer)
            if event.type == _ITEM_DONE:
                items[event.output_index] = event.item
        answer["output"] = msgspec.Raw(encode([items[index] for index in sorted(items)]))
        return encode(answer)


class ResponsesReader:
    """Reads the usage and the end of an answer that passes unchanged."""

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected = Collected()

    def whole(self, body: bytes) -> bytes:
        """Returns the answer unchanged."""
        self.collected.payloads.append(body)
        self.collected.complete = self._read_answer(body)
        return body

    def event(self, event: bytes) -> bytes:
        """Returns the event unchanged."""
        collected = self.collected
        collected.streamed = True
        data = event_data(event)
        if data is None or data == DONE:
            return event
        try:
            outline = _EVENT.decode(data)
        except UNREADABLE:
            collected.malformed = True
            return event
        collected.sequence = outline.sequence_number + 1
        if outline.type in _KEPT:
            collected.payloads.append(data)
        if outline.type in _LAST:
            collected.complete = self._read_answer(bytes(outline.response))
            collected.error = collected.error or outline.type == _FAILED
        elif outline.type == "error":
            collected.error = True
        return event

    def end(self) -> bytes:
        """Returns nothing: the stream has its own last event."""
        return b""

    def _read_answer(self, answer: bytes) -> bool:
        """Reads the usage; returns whether the input is an answer."""
        try:
            read_answer = _ANSWER.decode(answer)
        except UNREADABLE:
            self.collected.malformed = True
            return False
        if bytes(read_answer.usage) != b"null":
            self.collected.usage.append(read_answer.usage)
        self.collected.error = self.collected.error or read_answer.status == "failed"
        return True
