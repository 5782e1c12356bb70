"""The parts of chat requests and answers that are translated.

`cache_control` is Anthropic's mark of a prefix to cache, which callers of chat completions set in the places that it has
in Messages.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fulmen_llm_proxy.apis.api import ABSENT
from fulmen_llm_proxy.translation.equivalents import ChatUsage


class ImageUrl(msgspec.Struct):
    """An image, by URL or as a `data:` URL."""

    url: str


class File(msgspec.Struct):
    """A document."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    file: File | None = None
    cache_control: msgspec.Raw = ABSENT


class Function(msgspec.Struct):
    """The function of a tool call; in a stream, a piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call; in a stream, a piece of one."""

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: Function | None = None
    cache_control: msgspec.Raw = ABSENT


class ThinkingBlock(msgspec.Struct):
    """A thinking block of Messages, which callers return unchanged."""

    type: str = "thinking"
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class ChatMessage(msgspec.Struct):
    """A message, or a piece of one."""

    role: str | None = None
    content: str | list[Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: list[ThinkingBlock] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    cache_control: msgspec.Raw = ABSENT


class FunctionTool(msgspec.Struct):
    """The definition of a function."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None
    cache_control: msgspec.Raw = ABSENT


class ChatTool(msgspec.Struct):
    """A tool that the model may call."""

    type: str = "function"
    function: FunctionTool | None = None
    cache_control: msgspec.Raw = ABSENT


class NamedFunction(msgspec.Struct):
    """A reference to a function."""

    name: str


class NamedChoice(msgspec.Struct):
    """A forced tool choice."""

    type: str
    function: NamedFunction | None = None


class JsonSchema(msgspec.Struct):
    """A named JSON schema."""

    schema: msgspec.Raw = ABSENT


class ResponseFormat(msgspec.Struct):
    """The required format of an answer."""

    type: str
    json_schema: JsonSchema | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class Choice(msgspec.Struct):
    """A choice of an answer, or a piece of one."""

    index: int = 0
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM's field: the stop sequence or token id that ended the answer."""


class Completion(msgspec.Struct):
    """An answer, or an event of a stream."""

    id: str | None = None
    model: str | None = None
    choices: list[Choice] | None = None
    usage: ChatUsage | None = None
    error: msgspec.Raw = ABSENT
