"""Replaces the ids in stored responses by signed ones (`calls.responses.response_ids`).

Invariant: only `id` and `previous_response_id` change; the rest of an answer passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE, AnswerReader, decode_fields, encode
from fulmen_llm_proxy.apis.collected import Collected, Fields
from fulmen_llm_proxy.apis.sse import encode_event, event_data

_IDS = ("id", "previous_response_id")
_HAS_ANSWER = b'"response"'
_STRING = msgspec.json.Decoder(str | None)
_NAME = msgspec.json.Decoder(str)


def sealed_answer(answer: bytes, seal: Callable[[str], str]) -> bytes:
    """Returns a `response` object with signed ids; any other input unchanged."""
    try:
        return encode(_sealed(decode_fields(answer), seal))
    except UNREADABLE:
        return answer


class SealedReader:
    """Wraps a reader, and signs the ids in the caller's answer."""

    __slots__ = ("_reader", "_seal")

    def __init__(self, reader: AnswerReader, seal: Callable[[str], str]) -> None:
        """Sets the wrapped reader, and the function that signs a backend's id."""
        self._reader = reader
        self._seal = seal

    @property
    def collected(self) -> Collected:
        """The slices of the answer, with the backend's own ids."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer with signed ids."""
        return sealed_answer(self._reader.whole(body), self._seal)

    def event(self, event: bytes) -> bytes:
        """Returns the event, with signed ids if it contains the response."""
        passed = self._reader.event(event)
        data = event_data(passed) if _HAS_ANSWER in passed else None
        if data is None:
            return passed
        try:
            fields = decode_fields(data)
            if "response" not in fields:
                return passed  # a text that contains the word
            fields["response"] = msgspec.Raw(encode(_sealed(decode_fields(fields["response"]), self._seal)))
            return encode_event(encode(fields), _NAME.decode(fields["type"]).encode())
        except (*UNREADABLE, KeyError):
            return passed

    def end(self) -> bytes:
        """Returns the wrapped reader's last events."""
        return self._reader.end()


def _sealed(answer: Fields, seal: Callable[[str], str]) -> Fields:
    for name in _IDS:
        found = _STRING.decode(answer[name]) if name in answer else None
        if found:
            answer[name] = msgspec.Raw(encode(seal(found)))
    return answer
