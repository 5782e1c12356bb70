"""Responses of a backend that keeps them, with ids by which their callers find them again.

Invariant: only `id` and `previous_response_id` change; everything else of an answer passes as it is.
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
    """Returns a `response` object with sealed ids; as it is if it is none."""
    try:
        return encode(_sealed(decode_fields(answer), seal))
    except UNREADABLE:
        return answer


class SealedReader:
    """Reads an answer by another reader, and seals the ids in what the caller gets."""

    __slots__ = ("_reader", "_seal")

    def __init__(self, reader: AnswerReader, seal: Callable[[str], str]) -> None:
        """Takes the reader, and what makes a caller's id of the backend's."""
        self._reader = reader
        self._seal = seal

    @property
    def collected(self) -> Collected:
        """What the answer brought, with the backend's own ids."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer with sealed ids."""
        return sealed_answer(self._reader.whole(body), self._seal)

    def event(self, event: bytes) -> bytes:
        """Returns the event; one that has the response in it, with sealed ids."""
        passed = self._reader.event(event)
        data = event_data(passed) if _HAS_ANSWER in passed else None
        if data is None:
            return passed
        try:
            fields = decode_fields(data)
            if "response" not in fields:
                return passed  # a text that looks like it
            fields["response"] = msgspec.Raw(encode(_sealed(decode_fields(fields["response"]), self._seal)))
            return encode_event(encode(fields), _NAME.decode(fields["type"]).encode())
        except (*UNREADABLE, KeyError):
            return passed

    def end(self) -> bytes:
        """Returns what the other reader still has."""
        return self._reader.end()


def _sealed(answer: Fields, seal: Callable[[str], str]) -> Fields:
    for name in _IDS:
        found = _STRING.decode(answer[name]) if name in answer else None
        if found:
            answer[name] = msgspec.Raw(encode(seal(found)))
    return answer
