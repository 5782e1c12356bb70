"""OpenAI completions, with token ids if the engine returns them.

Invariant: fields unknown to the proxy pass through byte for byte. Unlike in chat completions, each choice has its own
prompt, since a call may contain several.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import (
    COUNT,
    FLAG,
    TEXT,
    TRUE,
    ApiName,
    CallRequest,
    Dialect,
    RequestReader,
    encode,
    read,
)
from fulmen_llm_proxy.apis.assembly import JSON
from fulmen_llm_proxy.apis.chat import wants_usage, with_usage
from fulmen_llm_proxy.apis.chat_assembly import assemble
from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked, Fields

_CHOSEN_ONLY = msgspec.Raw(b"0")
"""Value of `logprobs` that requests only the sampled tokens' log-probabilities."""


class CompletionsApi:
    """`POST /v1/completions`."""

    name = ApiName.COMPLETIONS
    dialect = Dialect.OPENAI
    path = "/completions"
    operation = "text_completion"
    generates = True
    is_metered = True
    can_capture = True

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request; see `Api.parse`."""
        reader = RequestReader(body, self.name, ("model", "prompt"))
        return CallRequest(
            api=self,
            model=reader.get("model", TEXT, ""),
            stream=bool(reader.get("stream", FLAG, None)),
            asked=Asked(
                token_ids=bool(reader.get("return_token_ids", FLAG, None)),
                logprobs=reader.get("logprobs", COUNT, None) is not None,
                stream_usage=wants_usage(reader),
            ),
            max_tokens=reader.get("max_tokens", COUNT, None),
            fields=reader.check(),
        )

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend.

        Raises:
            ArgumentInvalid: if a captured call asks for `echo`: engines then count the prompt's tokens as completion
                tokens.
        """
        if not (capture or stream):
            return encode(fields)
        asked = dict(fields)
        if capture:
            if read(fields, "echo", FLAG, None):
                raise ArgumentInvalid(
                    "`echo` is not supported for a trainable model: prompt and completion could not be distinguished."
                )
            asked["return_token_ids"] = TRUE
            if read(fields, "logprobs", COUNT, None) is None:
                asked["logprobs"] = _CHOSEN_ONLY
        if stream:
            asked["stream_options"] = with_usage(fields.get("stream_options"))
        return encode(asked)

    def reader(self, asked: Asked) -> CompletionsReader:
        """Returns a new reader."""
        return CompletionsReader(asked)

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Assembles the `text_completion` object of a stream."""
        return assemble_completion(payloads)


class CompletionsReader(ChatReader):
    """Extracts the capture of an answer, as for chat, with the prompt token ids of each choice."""

    __slots__ = ()

    def _extract_choice(self, choice: Fields) -> bool:
        touched = super()._extract_choice(choice)
        prompt_ids = choice.get("prompt_token_ids")
        if prompt_ids is None:
            return touched
        if bytes(prompt_ids) != b"null":
            raw_index = choice.get("index")
            self.collected.choice(0 if raw_index is None else int(bytes(raw_index))).prompt_ids = prompt_ids
        if not self._asked.token_ids:
            del choice["prompt_token_ids"]
            touched = True
        return touched


class _Chunk(msgspec.Struct):
    index: int = 0
    text: str | None = None
    logprobs: JSON | None = None
    token_ids: list[Any] | None = None


class _Event(msgspec.Struct):
    choices: list[_Chunk] | None = None


def assemble_completion(payloads: list[bytes]) -> bytes:
    """Assembles the `text_completion` object of a stream, as JSON."""
    return assemble(payloads, _Event, "text_completion", _add)


def _add(choice: JSON, chunk: JSON) -> None:
    for key, value in chunk.items():
        held = choice.get(key)
        if key == "text" and held is not None:
            choice[key] = held + (value or "")
        elif key == "logprobs" and held is not None and value is not None:
            _extend(held, value)
        elif key == "token_ids" and held is not None:
            held.extend(value or ())
        elif value is not None or key not in choice:
            choice[key] = value


def _extend(held: JSON, piece: JSON) -> None:
    """Extends the parallel lists of the log-probabilities, which have an entry per token."""
    for key, values in piece.items():
        if isinstance(held.get(key), list) and isinstance(values, list):
            held[key].extend(values)
        elif held.get(key) is None:
            held[key] = values
