"""Translates a Responses request to a chat completions request.

Fields of neither API pass through, since engines have their own. Fields that require a server with stored responses or
its own tools are rejected in one error.
"""

from __future__ import annotations

import msgspec

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import TRUE, encode, read, require
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.translation.responses_input import JSON, Item, MessageWriter
from fulmen_llm_proxy.translation.responses_tools import add_tools
from fulmen_llm_proxy.translation.translator import UnsupportedFields

LOGPROBS_INCLUDED = "message.output_text.logprobs"

_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
"""Rejected unless null or false: they need a server that has what they name, or that works on its own."""
_UNSUPPORTED = ("context_management", "moderation")
_RESPONSES_ONLY = frozenset(
    {
        *_STATEFUL,
        *_UNSUPPORTED,
        "store",  # the proxy stores the response itself
        "access_programs",
        "background_options",
        "client_metadata",  # of Codex, about itself
        "image",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_options",
        "reasoning",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
    }
)
_NOTHING = frozenset({b"null", b"false"})
_NULL = b"null"


class _Format(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    schema: Fields | None = None
    description: str | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


_INPUT = msgspec.json.Decoder(str | list[Item] | None)
_STRING = msgspec.json.Decoder(str | None)
_TEXT = msgspec.json.Decoder(_Text | None)
_REASONING = msgspec.json.Decoder(_Reasoning | None)
_INCLUDE = msgspec.json.Decoder(list[str] | None)
_COUNT = msgspec.json.Decoder(int | None)


def wants_logprobs(fields: Fields) -> bool:
    """Returns whether the caller requested log-probabilities.

    Raises:
        ArgumentInvalid: if a field has the wrong type.
    """
    return LOGPROBS_INCLUDED in (read(fields, "include", _INCLUDE, None) or ()) or bool(
        read(fields, "top_logprobs", _COUNT, None)
    )


def chat_request(fields: Fields, unsupported: UnsupportedFields) -> Fields:
    """Returns the chat completions request.

    Raises:
        ArgumentInvalid: if fields have the wrong type or cannot be expressed; names all of them.
    """
    require(fields, ("input",))
    stateful = [f"`{name}`" for name in _STATEFUL if bytes(fields.get(name, b"null")) not in _NOTHING]
    if stateful:
        raise ArgumentInvalid(
            f"{', '.join(stateful)}: supported only by backends that serve the Responses API; this model is served by chat "
            "completions.",
        )
    for name in _UNSUPPORTED:
        if bytes(fields.get(name, b"null")) != _NULL:
            unsupported.param(name, f"`{name}`")
    if read(fields, "truncation", _STRING, None) not in (None, "disabled"):
        unsupported.param("truncation", "`truncation`: 'auto'")
    chat = {name: raw for name, raw in fields.items() if name not in _RESPONSES_ONLY and bytes(raw) != _NULL}
    chat["messages"] = _raw(_messages(fields, unsupported))
    add_tools(fields, chat, unsupported)
    _add_options(fields, chat, unsupported)
    unsupported.check()
    return chat


def _messages(fields: Fields, unsupported: UnsupportedFields) -> list[JSON]:
    writer = MessageWriter(unsupported)
    instructions = read(fields, "instructions", _STRING, None)
    if instructions:
        writer.messages.append({"role": "system", "content": instructions})
    said = read(fields, "input", _INPUT, None)
    if isinstance(said, str):
        writer.messages.append({"role": "user", "content": said})
    for index, item in enumerate(said if isinstance(said, list) else ()):
        writer.add(item, f"input[{index}]")
    return writer.messages


def _add_options(fields: Fields, chat: Fields, unsupported: UnsupportedFields) -> None:
    limit = read(fields, "max_output_tokens", _COUNT, None)
    if limit is not None:
        chat["max_completion_tokens"] = _raw(limit)
    reasoning = read(fields, "reasoning", _REASONING, None)
    if reasoning is not None and reasoning.effort is not None:
        chat["reasoning_effort"] = _raw(reasoning.effort)
    text = read(fields, "text", _TEXT, None) or _Text()
    if text.verbosity is not None:
        chat["verbosity"] = _raw(text.verbosity)
    shape = text.format or _Format()
    match shape.type:
        case "text":
            pass
        case "json_object":
            chat["response_format"] = _raw({"type": "json_object"})
        case "json_schema":
            translated = {
                "name": shape.name,
                "description": shape.description,
                "schema": shape.schema,
                "strict": shape.strict,
            }
            kept = {key: value for key, value in translated.items() if value is not None}
            chat["response_format"] = _raw({"type": "json_schema", "json_schema": kept})
        case _:
            unsupported.param("text.format", f"`text.format` of type '{shape.type}'")
    if wants_logprobs(fields):
        chat["logprobs"] = TRUE
        top = read(fields, "top_logprobs", _COUNT, None)
        if top:
            chat["top_logprobs"] = _raw(top)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))
