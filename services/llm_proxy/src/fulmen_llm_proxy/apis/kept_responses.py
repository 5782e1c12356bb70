"""Reads answers of the Responses API that the proxy itself stores.

Invariant: only `id`, `previous_response_id` and `store` change. The event that ends a stream, or the complete answer, is held
back until it is known whether the response was stored: a caller that has it can continue it anywhere.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import NULL, TRUE, UNREADABLE, AnswerReader, decode_fields, encode
from fulmen_llm_proxy.apis.collected import Collected, Fields
from fulmen_llm_proxy.apis.sse import EventSplitter, encode_event, event_data

_FALSE = msgspec.Raw(b"false")
_HAS_ANSWER = b'"response"'
_HELD = frozenset({"response.completed", "response.incomplete"})
_MAX_EVENT_BYTES = 1 << 31  # of translated events; the backend's own are bounded before
_NAME = msgspec.json.Decoder(str)


class KeptReader:
    """Wraps the reader of a translated answer.

    Attributes:
        response_id: the answer's new id; empty if it is not to be stored, and keeps the one it has.
    """

    __slots__ = ("_answer", "_event", "_previous", "_reader", "_splitter", "response_id")

    def __init__(self, reader: AnswerReader, *, response_id: str, previous_id: str) -> None:
        """Sets the wrapped reader.

        Args:
            response_id: id of the response; empty if it is not to be stored.
            previous_id: id of the response that it continues; empty if it is the first.
        """
        self.response_id = response_id
        self._reader = reader
        self._previous = msgspec.Raw(encode(previous_id)) if previous_id else NULL
        self._splitter = EventSplitter(_MAX_EVENT_BYTES)
        self._answer: Fields | None = None
        self._event: Fields | None = None

    @property
    def collected(self) -> Collected:
        """The slices of the backend's answer."""
        return self._reader.collected

    @property
    def held(self) -> bytes | None:
        """The response that is held back, as it is to be stored; None without one."""
        return None if self._answer is None else encode(self._answer)

    def whole(self, body: bytes) -> bytes:
        """Returns the answer; nothing while it is held back."""
        answer = self._marked(decode_fields(self._reader.whole(body)))
        if not self.response_id:
            return encode(answer)
        self._answer = answer
        return b""

    def event(self, event: bytes) -> bytes:
        """Returns the caller's events, without the one that is held back."""
        return self._passed(self._reader.event(event))

    def end(self) -> bytes:
        """Returns the events that end the stream, without the one that is held back."""
        return self._passed(self._reader.end())

    def release(self, *, stored: bool) -> bytes:
        """Returns what was held back, the answer or the stream's last event."""
        answer, event = self._answer, self._event
        if answer is None:
            return b""
        self._answer = self._event = None
        answer["store"] = TRUE if stored else _FALSE
        if event is None:
            return encode(answer)
        return _encoded(event, answer)

    def _passed(self, events: bytes) -> bytes:
        if _HAS_ANSWER not in events:
            return events
        return b"".join([self._one(event) for event in self._splitter.feed(events)])

    def _one(self, event: bytes) -> bytes:
        data = event_data(event) if _HAS_ANSWER in event else None
        if data is None:
            return event
        try:
            fields = decode_fields(data)
            if "response" not in fields:
                return event  # a text that contains the word
            answer, name = self._marked(decode_fields(fields["response"])), _NAME.decode(fields["type"])
        except (*UNREADABLE, KeyError):
            return event
        if name in _HELD and self.response_id:
            self._answer, self._event = answer, fields
            return b""
        return _encoded(fields, answer)

    def _marked(self, answer: Fields) -> Fields:
        if self.response_id:
            answer["id"] = msgspec.Raw(encode(self.response_id))
        answer["previous_response_id"] = self._previous
        answer["store"] = TRUE if self.response_id else _FALSE
        return answer


def _encoded(event: Fields, answer: Fields) -> bytes:
    event["response"] = msgspec.Raw(encode(answer))
    return encode_event(encode(event), _NAME.decode(event["type"]).encode())
