"""Anthropic's token counting, passed through; nothing is sampled and no tokens are used."""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import TEXT, ApiName, CallRequest, Dialect, RequestReader, encode
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields


class _Count(msgspec.Struct):
    input_tokens: int


_COUNT = msgspec.json.Decoder(_Count)


class CountTokensApi:
    """`POST /v1/messages/count_tokens`."""

    name = ApiName.COUNT_TOKENS
    dialect = Dialect.ANTHROPIC
    path = "/messages/count_tokens"
    operation = "count_tokens"
    generates = False
    is_metered = False
    can_capture = False

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model", "messages"))
        model = reader.get("model", TEXT, "")
        return CallRequest(api=self, model=model, stream=False, asked=Asked(), fields=reader.check(), max_tokens=0)

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields unchanged."""
        return encode(fields)

    def reader(self, asked: Asked) -> CountReader:
        """Returns a new reader."""
        return CountReader()

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Returns nothing: a count is not streamed."""
        return b""


class CountReader:
    """Passes a count through. A count is not usage; it is collected as payload only."""

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected = Collected()

    def whole(self, body: bytes) -> bytes:
        """Returns the answer unchanged."""
        self.collected.payloads.append(body)
        try:
            _COUNT.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.collected.malformed = True
        else:
            self.collected.complete = True
        return body

    def event(self, event: bytes) -> bytes:
        """Returns an event unchanged; no backend streams a count."""
        return event

    def end(self) -> bytes:
        """Returns nothing."""
        return b""
