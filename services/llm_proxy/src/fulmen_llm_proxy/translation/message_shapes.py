"""The parts of Messages requests and answers that are translated.

All types of blocks share one struct: required fields are checked during translation, so that one error can name all
violations.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import ABSENT
from fulmen_llm_proxy.translation.equivalents import MessageUsage


class Source(msgspec.Struct):
    """The source of an image or document."""

    type: str = ""
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct):
    """A content block."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    tool_use_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    content: msgspec.Raw = ABSENT
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None


class Turn(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool definition."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(msgspec.Struct):
    """A tool choice."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct):
    """The required format of an answer."""

    type: str = ""
    schema: msgspec.Raw = ABSENT


class OutputConfig(msgspec.Struct):
    """Options of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


class Thinking(msgspec.Struct):
    """How much the model thinks."""

    type: str = ""
    budget_tokens: int | None = None


class Metadata(msgspec.Struct):
    """The end user of a request."""

    user_id: str | None = None


class StopDetails(msgspec.Struct):
    """Details of a stop."""

    explanation: str | None = None


class Message(msgspec.Struct):
    """An answer."""

    type: str
    id: str = ""
    model: str = ""
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: StopDetails | None = None
    usage: MessageUsage = msgspec.field(default_factory=MessageUsage)
