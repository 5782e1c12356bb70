"""OpenAI embeddings, passed through as floats or base64; only the usage is read."""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import TEXT, ApiName, CallRequest, Dialect, RequestReader, decode_fields, encode
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields


class EmbeddingsApi:
    """`POST /v1/embeddings`."""

    name = ApiName.EMBEDDINGS
    dialect = Dialect.OPENAI
    path = "/embeddings"
    operation = "embeddings"
    generates = False
    is_metered = True
    can_capture = False

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model", "input"))
        return CallRequest(
            api=self,
            model=reader.get("model", TEXT, ""),
            stream=False,
            asked=Asked(),
            max_tokens=0,
            fields=reader.check(),
        )

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields unchanged."""
        return encode(fields)

    def reader(self, asked: Asked) -> EmbeddingsReader:
        """Returns a new reader."""
        return EmbeddingsReader()

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Returns nothing: embeddings are not streamed."""
        return b""


class EmbeddingsReader:
    """Reads the usage of an answer. The embeddings are not recorded: they are large and never trained on."""

    __slots__ = ("collected",)

    def __init__(self) -> None:
        self.collected = Collected()

    def whole(self, body: bytes) -> bytes:
        """Returns the answer unchanged."""
        try:
            usage = decode_fields(body).get("usage")
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.collected.malformed = True
            return body
        if usage is not None and bytes(usage) != b"null":
            self.collected.usage.append(usage)
        self.collected.complete = True
        return body

    def event(self, event: bytes) -> bytes:
        """Returns an event unchanged; no backend streams embeddings."""
        return event

    def end(self) -> bytes:
        """Returns nothing."""
        return b""
