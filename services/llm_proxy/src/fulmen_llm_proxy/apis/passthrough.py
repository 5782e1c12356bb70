"""APIs that generate nothing and pass through unchanged: OpenAI's embeddings and Anthropic's token counting."""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import (
    TEXT,
    UNREADABLE,
    Api,
    ApiName,
    CallRequest,
    Dialect,
    RequestReader,
    decode_fields,
    encode,
)
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields


class _Count(msgspec.Struct):
    input_tokens: int


_COUNT = msgspec.json.Decoder(_Count)


class _PassthroughApi:
    """What both APIs have in common."""

    operation: str
    generates = False
    is_metered: bool
    can_capture = False

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields unchanged."""
        return encode(fields)

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Returns nothing: the answers are not streamed."""
        return b""


def _request(api: Api, body: bytes, required: tuple[str, ...]) -> CallRequest:
    reader = RequestReader(body, api.name, required)
    model = reader.get("model", TEXT, "")
    return CallRequest(api=api, model=model, stream=False, asked=Asked(), fields=reader.check(), max_tokens=0)


class EmbeddingsApi(_PassthroughApi):
    """`POST /v1/embeddings`."""

    name = ApiName.EMBEDDINGS
    dialect = Dialect.OPENAI
    path = "/embeddings"
    operation = "embeddings"
    is_metered = True

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        return _request(self, body, ("model", "input"))

    def reader(self, asked: Asked) -> EmbeddingsReader:
        """Returns a new reader."""
        return EmbeddingsReader()


class CountTokensApi(_PassthroughApi):
    """`POST /v1/messages/count_tokens`; a count is not usage."""

    name = ApiName.COUNT_TOKENS
    dialect = Dialect.ANTHROPIC
    path = "/messages/count_tokens"
    operation = "count_tokens"
    is_metered = False

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        return _request(self, body, ("model", "messages"))

    def reader(self, asked: Asked) -> CountReader:
        """Returns a new reader."""
        return CountReader()


class _PassthroughReader:
    """Passes events unchanged; no backend streams these answers."""

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected = Collected()

    def event(self, event: bytes) -> bytes:
        """Returns an event unchanged."""
        return event

    def end(self) -> bytes:
        """Returns nothing."""
        return b""


class EmbeddingsReader(_PassthroughReader):
    """Reads the usage of an answer. The embeddings are not recorded: they are large and never trained on."""

    __slots__ = ()

    def whole(self, body: bytes) -> bytes:
        """Returns the answer unchanged."""
        try:
            usage = decode_fields(body).get("usage")
        except UNREADABLE:
            self.collected.malformed = True
            return body
        if usage is not None and bytes(usage) != b"null":
            self.collected.usage.append(usage)
        self.collected.complete = True
        return body


class CountReader(_PassthroughReader):
    """Collects a count as payload only."""

    __slots__ = ()

    def whole(self, body: bytes) -> bytes:
        """Returns the answer unchanged."""
        self.collected.payloads.append(body)
        try:
            _COUNT.decode(body)
        except UNREADABLE:
            self.collected.malformed = True
        else:
            self.collected.complete = True
        return body
