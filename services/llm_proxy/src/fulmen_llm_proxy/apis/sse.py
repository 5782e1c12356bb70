"""Server-sent events as byte slices.

Invariant: the concatenated events of `EventSplitter` and its rest equal the input; chunk boundaries of the network
never change the events.

Source: the event stream format of the WHATWG HTML standard, section 9.2. Bare carriage returns as
line ends are not recognised: no model server sends them.
"""

from __future__ import annotations

import re

from fulmen.errors import BackendUnavailable

DONE = b"[DONE]"
"""The data of the last event of an OpenAI stream."""

_EVENT_END = re.compile(rb"\n\r?\n")
_DATA_FIELD = b"data:"
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class EventSplitter:
    """Splits a byte stream into complete events with their terminators."""

    __slots__ = ("_max_event_bytes", "_rest")

    def __init__(self, max_event_bytes: int) -> None:
        self._rest = b""
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the events completed by this chunk, in order.

        Raises:
            BackendUnavailable: if an event exceeds `max_event_bytes`.
        """
        pending = self._rest
        if not pending and 0 <= chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return [chunk]  # a single complete event, the usual case
        buffer = pending + chunk if pending else chunk
        # Up to two of the three bytes of a terminator may be in the rest.
        searched = max(0, len(pending) - 2)
        events: list[bytes] = []
        start = 0
        for match in _EVENT_END.finditer(buffer, searched):
            end = match.end()
            events.append(buffer[start:end])
            start = end
        self._rest = buffer[start:] if start else buffer
        if len(self._rest) > self._max_event_bytes:
            raise BackendUnavailable(
                "The backend sent an event larger than the limit.",
                limit_bytes=self._max_event_bytes,
            )
        return events

    def rest(self) -> bytes:
        """Returns and drops the bytes after the last complete event."""
        rest, self._rest = self._rest, b""
        return rest


def event_data(event: bytes) -> bytes | None:
    """Returns the data of an event, multiple lines joined by newlines; None without data (a comment, a ping)."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[6:].rstrip(b"\r\n")
    lines = [
        line[len(_DATA_FIELD) :].removeprefix(b" ")
        for line in event.replace(b"\r\n", b"\n").split(b"\n")
        if line.startswith(_DATA_FIELD)
    ]
    return b"\n".join(lines) if lines else None


def event_name(event: bytes) -> str:
    """Returns the name of an event; empty without one."""
    if not event.startswith(b"event:"):
        found = event.find(b"\nevent:")
        if found < 0:
            return ""
        event = event[found + 1 :]
    return event[len(b"event:") :].split(b"\n", 1)[0].strip().decode("utf-8", "replace")


def encode_event(data: bytes, name: bytes = b"") -> bytes:
    """Returns an event with a JSON document, and an optional name.

    Line breaks of the document, which can only stand between its tokens, become spaces: they would end the field.
    """
    if b"\n" in data or b"\r" in data:
        data = data.translate(_ONE_LINE)
    return b"event: %s\ndata: %s\n\n" % (name, data) if name else b"data: %s\n\n" % data
