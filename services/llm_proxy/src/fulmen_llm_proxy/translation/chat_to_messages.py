"""Translates chat completions to Messages.

Source: the chat completions API of OpenAI; the Messages API of Anthropic, version 2023-06-01.
`docs/dialects.md` has the mapping.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import UNREADABLE, ApiName, encode, given, read
from fulmen_llm_proxy.apis.collected import Asked, Fields
from fulmen_llm_proxy.translation.chat_shapes import (
    ChatMessage,
    ChatTool,
    NamedChoice,
    ResponseFormat,
    StreamOptions,
)
from fulmen_llm_proxy.translation.chat_turns import Conversation
from fulmen_llm_proxy.translation.chunk_stream import ChunkStream
from fulmen_llm_proxy.translation.equivalents import EFFORTS, JSON, chat_id, chat_usage, finish_of
from fulmen_llm_proxy.translation.message_shapes import Block, Message
from fulmen_llm_proxy.translation.translator import UnsupportedFields

DEFAULT_MAX_TOKENS = 8192
"""Maximum answer if the caller sets none; Messages requires one, chat completions do not."""

_MAX_TEMPERATURE = 1.0
_MESSAGES = msgspec.json.Decoder(list[ChatMessage])
_COUNT = msgspec.json.Decoder(int | None)
_NUMBER = msgspec.json.Decoder(float | None)
_FLAG = msgspec.json.Decoder(bool | None)
_TEXT = msgspec.json.Decoder(str | None)
_STOP = msgspec.json.Decoder(str | list[str] | None)
_TOOLS = msgspec.json.Decoder(list[ChatTool] | None)
_TOOL_CHOICE = msgspec.json.Decoder(str | NamedChoice | None)
_FORMAT = msgspec.json.Decoder(ResponseFormat | None)
_OPTIONS = msgspec.json.Decoder(StreamOptions | None)
_OUTPUT_CONFIG = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_MODALITIES = msgspec.json.Decoder(list[str] | None)
_MESSAGE = msgspec.json.Decoder(Message)

_PASSED = (
    "model",
    "stream",
    "top_p",
    "top_k",
    "thinking",
    "cache_control",
    "container",
    "context_management",
    "inference_geo",
    "speed",
)
"""Fields that are equal in both APIs, or that only callers of Messages send."""

_NEUTRAL = {
    "n": (b"1", b"null"),
    "logprobs": (b"false", b"null"),
    "top_logprobs": (b"0", b"null"),
    "logit_bias": (b"{}", b"null"),
    "frequency_penalty": (b"0", b"0.0", b"null"),
    "presence_penalty": (b"0", b"0.0", b"null"),
    "audio": (b"null",),
    "functions": (b"[]", b"null"),
    "function_call": (b'"none"', b"null"),
    "web_search_options": (b"null",),
}
"""Fields without an equivalent in Messages, and the values that have no effect."""


class ChatToMessages:
    """Translates one try; see `Translator`."""

    __slots__ = ("_created", "_stream", "asked", "unsupported")

    def __init__(self, *, drops: bool = False, now: Callable[[], float] = time.time) -> None:
        """Sets whether parameters are dropped, and the clock; Messages answers have no creation time."""
        self.asked = Asked(stream_usage=True)
        self.unsupported = UnsupportedFields(ApiName.MESSAGES, drops=drops)
        self._created = int(now())
        self._stream = ChunkStream(self._created)

    def request(self, fields: Fields) -> Fields:
        """Returns the Messages request.

        Raises:
            ArgumentInvalid: if the request is malformed, or cannot be expressed in Messages.
        """
        unsupported = self.unsupported
        for name, neutral in _NEUTRAL.items():
            if name in fields and bytes(fields[name]) not in neutral:
                unsupported.param(name, f"{name} (no equivalent)")
        if "audio" in (read(fields, "modalities", _MODALITIES, None) or ()):
            unsupported.param("modalities", "modalities (`audio`)")
        conversation = Conversation(unsupported)
        messages: list[ChatMessage] = read(fields, "messages", _MESSAGES, [])
        for index, message in enumerate(messages):
            conversation.add(f"messages[{index}]", message)
        conversation.end()
        translated: JSON = {"messages": conversation.turns, **_sampling(fields)}
        if conversation.system:
            translated["system"] = conversation.system
        user = read(fields, "user", _TEXT, None) or read(fields, "safety_identifier", _TEXT, None)
        if user:
            translated["metadata"] = {"user_id": user}
        translated |= _tools(fields, conversation, unsupported)
        translated |= _output(fields, unsupported)
        unsupported.check()
        options = read(fields, "stream_options", _OPTIONS, None)
        self._stream.includes_usage = bool(options and options.include_usage)
        kept = {name: fields[name] for name in _PASSED if name in fields}
        return kept | {name: msgspec.Raw(encode(value)) for name, value in translated.items()}

    def whole(self, body: bytes) -> bytes:
        """Returns the answer as a chat completion.

        Raises:
            BackendUnavailable: if it is not a message.
        """
        try:
            answer = _MESSAGE.decode(body)
        except UNREADABLE as error:
            raise BackendUnavailable("The backend's answer is not a message.") from error
        if answer.type != "message":
            raise BackendUnavailable("The backend's answer is not a message.")
        choice: JSON = {
            "index": 0,
            "message": _message(answer),
            "logprobs": None,
            "finish_reason": finish_of(answer.stop_reason),
        }
        if answer.stop_sequence is not None:
            choice["stop_reason"] = answer.stop_sequence
        completion: JSON = {
            "id": chat_id(answer.id),
            "object": "chat.completion",
            "created": self._created,
            "model": answer.model,
            "choices": [choice],
            "usage": chat_usage(answer.usage),
        }
        return encode(completion)

    def event(self, event: bytes) -> list[bytes]:
        """Returns the chunks for one event of the Messages stream; see `ChunkStream`."""
        return self._stream.event(event)

    def end(self) -> list[bytes]:
        """Returns nothing, or raises if the stream broke off; see `ChunkStream`."""
        return self._stream.end()


def _sampling(fields: Fields) -> JSON:
    translated: JSON = {}
    limit = read(fields, "max_completion_tokens", _COUNT, None)
    limit = read(fields, "max_tokens", _COUNT, None) if limit is None else limit
    translated["max_tokens"] = DEFAULT_MAX_TOKENS if limit is None else limit
    temperature = read(fields, "temperature", _NUMBER, None)
    if temperature is not None:
        # The maximum is 2 in chat completions and 1 in Messages; Anthropic's own OpenAI endpoint caps it likewise.
        translated["temperature"] = min(temperature, _MAX_TEMPERATURE)
    stop = read(fields, "stop", _STOP, None)
    if stop:
        translated["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    return translated


def _tools(fields: Fields, conversation: Conversation, unsupported: UnsupportedFields) -> JSON:
    given_tools = read(fields, "tools", _TOOLS, None) or []
    tools = [_tool(f"tools[{index}]", tool, unsupported) for index, tool in enumerate(given_tools)]
    translated: JSON = {"tools": [tool for tool in tools if tool]}
    if not given_tools or (unsupported.drops and not translated["tools"]):
        # Messages rejects a conversation with tool calls but no tool definitions.
        named = [{"name": name, "input_schema": {"type": "object"}} for name in conversation.tool_names]
        return {"tools": named, "tool_choice": {"type": "none"}} if named else {}
    wanted = read(fields, "tool_choice", _TOOL_CHOICE, None)
    parallel = read(fields, "parallel_tool_calls", _FLAG, None)
    choice: JSON | None = None
    match wanted:
        case None:
            choice = {"type": "auto"} if parallel is False else None
        case "auto" | "none":
            choice = {"type": wanted}
        case "required":
            choice = {"type": "any"}
        case NamedChoice(type="function", function=function) if function is not None:
            choice = {"type": "tool", "name": function.name}
        case _:
            unsupported.param("tool_choice", "tool_choice (neither a mode of the Messages API nor a function)")
    if choice is not None:
        if parallel is False and choice["type"] != "none":
            choice["disable_parallel_tool_use"] = True
        translated["tool_choice"] = choice
    return translated


def _tool(place: str, tool: ChatTool, unsupported: UnsupportedFields) -> JSON:
    function = tool.function
    if tool.type != "function" or function is None:
        unsupported.param("tools", f"{place} (a tool of type `{tool.type}`)")
        return {}
    translated: JSON = {"name": function.name}
    if function.description:
        translated["description"] = function.description
    translated["input_schema"] = (
        function.parameters if given(function.parameters) else {"type": "object", "properties": {}}
    )
    if function.strict is not None:
        translated["strict"] = function.strict
    mark = tool.cache_control if given(tool.cache_control) else function.cache_control
    return translated | {"cache_control": mark} if given(mark) else translated


def _output(fields: Fields, unsupported: UnsupportedFields) -> JSON:
    config: JSON = dict(read(fields, "output_config", _OUTPUT_CONFIG, None) or {})
    effort = read(fields, "reasoning_effort", _TEXT, None)
    translated: JSON = {}
    if effort in EFFORTS:
        config.setdefault("effort", EFFORTS[effort])
    elif effort == "none" and "thinking" not in fields:
        translated["thinking"] = {"type": "disabled"}
    wanted = read(fields, "response_format", _FORMAT, None)
    match wanted:
        case None | ResponseFormat(type="text"):
            pass
        case ResponseFormat(type="json_schema", json_schema=named) if named is not None and given(named.schema):
            config["format"] = {"type": "json_schema", "schema": named.schema}
        case _:
            unsupported.param("response_format", f"response_format (`{wanted.type}`; a `json_schema` is supported)")
    return translated | {"output_config": config} if config else translated


def _message(answer: Message) -> JSON:
    translated: JSON = {"role": "assistant", "content": None, "refusal": None}
    texts = [block.text or "" for block in answer.content if block.type == "text"]
    if texts:
        translated["content"] = "".join(texts)
    calls = [_call(block) for block in answer.content if block.type == "tool_use"]
    if calls:
        translated["tool_calls"] = calls
    thoughts = [block for block in answer.content if block.type in ("thinking", "redacted_thinking")]
    if thoughts:
        translated["reasoning_content"] = "".join(block.thinking or "" for block in thoughts)
        translated["thinking_blocks"] = [_thought(block) for block in thoughts]
    if answer.stop_reason == "refusal":
        translated["refusal"] = (answer.stop_details and answer.stop_details.explanation) or None
    return translated


def _call(block: Block) -> JSON:
    arguments = bytes(block.input).decode() if given(block.input) else "{}"
    return {"id": block.id or "", "type": "function", "function": {"name": block.name or "", "arguments": arguments}}


def _thought(block: Block) -> JSON:
    if block.type == "redacted_thinking":
        return {"type": block.type, "data": block.data or ""}
    return {"type": block.type, "thinking": block.thinking or "", "signature": block.signature or ""}
