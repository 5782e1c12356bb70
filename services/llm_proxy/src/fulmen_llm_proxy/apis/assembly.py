"""Decodes the events of a stream for the record of its call.

Invariant: whatever a backend sent, assembling raises nothing. An event whose parts have other types than its API's is
left out; every other value is kept as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE

JSON = dict[str, Any]  # Any: the events are the backend's own, of any depth

_DECODE = msgspec.json.Decoder(JSON).decode
_ENCODE = msgspec.json.Encoder().encode


def assembled(payloads: Iterable[bytes], shape: type, build: Callable[[Iterator[JSON]], JSON]) -> bytes:
    """Returns the answer of a stream as JSON; empty if it is nested too deeply.

    Args:
        shape: types of the parts of an event that `build` reads.
        build: adds the events up.
    """
    try:
        return _ENCODE(build(_events(payloads, shape)))
    except RecursionError:
        return b""


def decode_as(shape: type, payload: bytes) -> JSON:
    """Returns a JSON object whose parts have the types of a shape.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: `UNREADABLE`, if it is none.
    """
    document = _DECODE(payload)
    msgspec.convert(document, shape)
    return document


def whole_of(payload: bytes, *, was_read: bool) -> bytes:
    """Returns a complete answer as it came; empty if it is not a JSON object.

    Args:
        was_read: whether its reader found no fault. A reader checks all but the UTF-8 of texts that it skips, and a
            second decoding of an answer with its tokens costs a quarter of a call.
    """
    try:
        if was_read:
            payload.decode()
        else:
            _DECODE(payload)
    except UNREADABLE:
        return b""
    return payload


def _events(payloads: Iterable[bytes], shape: type) -> Iterator[JSON]:
    for payload in payloads:
        try:
            yield decode_as(shape, payload)
        except UNREADABLE:
            continue
