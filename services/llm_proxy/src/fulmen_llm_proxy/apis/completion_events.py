"""Converts a complete text completion to the events of a stream: one with all choices, which have the same form there."""

from __future__ import annotations

from fulmen_llm_proxy.apis.api import UNREADABLE, encode
from fulmen_llm_proxy.apis.assembly import JSON, decode_as
from fulmen_llm_proxy.apis.collected import Asked, Collected
from fulmen_llm_proxy.apis.completions import CompletionsReader
from fulmen_llm_proxy.apis.sse import DONE, encode_event


class WholeCompletionAsEvents:
    """Reads a complete answer and returns it as events; `event` takes the complete answer."""

    __slots__ = ("_asked", "_reader")

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._reader = CompletionsReader(asked)

    @property
    def collected(self) -> Collected:
        """The slices of the answer."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer without the parts that were not requested."""
        return self._reader.whole(body)

    def event(self, event: bytes) -> bytes:
        """Returns the events of the answer; the input itself as an event if it is malformed."""
        answer = self._reader.whole(event)
        if self.collected.malformed:
            return encode_event(answer)
        try:
            document = decode_as(JSON, answer)
        except UNREADABLE:
            self.collected.malformed = True
            return encode_event(answer)
        usage = document.pop("usage", None)
        events = [encode(document)]
        if self._asked.stream_usage and usage is not None:
            events.append(encode({**document, "choices": [], "usage": usage}))
        return b"".join(encode_event(each) for each in [*events, DONE])

    def end(self) -> bytes:
        """Returns nothing: `event` has returned everything."""
        return b""
