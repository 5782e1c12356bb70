"""OpenAI chat completions: the API of captured calls, and the hub of all translations.

Invariant: fields unknown to the proxy pass through byte for byte.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import (
    COUNT,
    FLAG,
    TEXT,
    TRUE,
    ApiName,
    CallRequest,
    Dialect,
    RequestReader,
    decode_fields,
    encode,
)
from fulmen_llm_proxy.apis.chat_assembly import assemble_answer
from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked, Fields


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_STREAM_OPTIONS = msgspec.json.Decoder(_StreamOptions | None)


class ChatApi:
    """`POST /v1/chat/completions`."""

    name = ApiName.CHAT
    dialect = Dialect.OPENAI
    path = "/chat/completions"
    operation = "chat"
    generates = True
    is_metered = True
    can_capture = True

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model", "messages"))
        max_tokens = reader.get("max_completion_tokens", COUNT, None)
        return CallRequest(
            api=self,
            model=reader.get("model", TEXT, ""),
            stream=bool(reader.get("stream", FLAG, None)),
            asked=Asked(
                token_ids=bool(reader.get("return_token_ids", FLAG, None)),
                logprobs=bool(reader.get("logprobs", FLAG, None)),
                stream_usage=wants_usage(reader),
            ),
            max_tokens=reader.get("max_tokens", COUNT, None) if max_tokens is None else max_tokens,
            fields=reader.check(),
        )

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend.

        Requests the usage of every stream, for limits and cost, and token ids and log-probabilities of captured calls.
        """
        if not (capture or stream):
            return encode(fields)
        asked = {**fields, "return_token_ids": TRUE, "logprobs": TRUE} if capture else dict(fields)
        if stream:
            asked["stream_options"] = with_usage(fields.get("stream_options"))
        return encode(asked)

    def reader(self, asked: Asked) -> ChatReader:
        """Returns a new reader."""
        return ChatReader(asked)

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Assembles the `chat.completion` object of a stream."""
        return assemble_answer(payloads)


def wants_usage(reader: RequestReader) -> bool:
    """Returns whether a request asks for the usage at the end of its stream."""
    options = reader.get("stream_options", _STREAM_OPTIONS, None)
    return bool(options and options.include_usage)


def with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    """Returns the stream options with `include_usage` set."""
    fields: Fields = {}
    if options is not None and bytes(options) != b"null":
        fields = decode_fields(options)
    fields["include_usage"] = TRUE
    return msgspec.Raw(encode(fields))
