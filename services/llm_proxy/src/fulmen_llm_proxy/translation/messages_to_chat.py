"""Translates Messages to chat completions, whose tokens can be captured.

Source: the Messages API of Anthropic, versions 2023-06-01 and 2026-10-21; the chat completions API of OpenAI, with the
extensions of vLLM and SGLang. `docs/dialects.md` has the mapping.
"""

from __future__ import annotations

import msgspec

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen_llm_proxy.apis.api import ABSENT, UNREADABLE, ApiName, encode, given, read
from fulmen_llm_proxy.apis.collected import Asked, Fields
from fulmen_llm_proxy.translation.chat_shapes import Choice, Completion
from fulmen_llm_proxy.translation.equivalents import (
    ABORTED,
    INVALID_JSON,
    JSON,
    effort_of,
    made_tool_id,
    message_id,
    message_usage,
    stop_of,
)
from fulmen_llm_proxy.translation.message_shapes import (
    Block,
    Metadata,
    OutputConfig,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
    Turn,
)
from fulmen_llm_proxy.translation.message_stream import MessageStream
from fulmen_llm_proxy.translation.messages_turns import chat_messages, referred_tools
from fulmen_llm_proxy.translation.translator import UnsupportedFields

_SYSTEM = msgspec.json.Decoder(str | list[Block] | None)
_TURNS = msgspec.json.Decoder(list[Turn])
_COUNT = msgspec.json.Decoder(int | None)
_STOPS = msgspec.json.Decoder(list[str] | None)
_TOOLS = msgspec.json.Decoder(list[Tool] | None)
_TOOL_CHOICE = msgspec.json.Decoder(ToolChoice | None)
_METADATA = msgspec.json.Decoder(Metadata | None)
_OUTPUT_CONFIG = msgspec.json.Decoder(OutputConfig | None)
_THINKING = msgspec.json.Decoder(Thinking | None)
_OUTPUT_FORMAT = msgspec.json.Decoder(OutputFormat | None)
_SERVERS = msgspec.json.Decoder(list[msgspec.Raw] | None)
_COMPLETION = msgspec.json.Decoder(Completion)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])

_TRANSLATED = frozenset(
    {
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "tools",
        "tool_choice",
        "metadata",
        "output_config",
        "output_format",
        "mcp_servers",
        "thinking",
    }
)
_DROPPED = frozenset(
    {
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "service_tier",
        "speed",
        "thread",
        "betas",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields for Anthropic's own service only; dropping them does not change the meaning of an answer."""


_NO_THREADS = "Threads of messages are not stored for this model: send the whole conversation, without `thread`."
"""The vendor's client does this automatically when it receives the code of this error."""


class MessagesToChat:
    """Translates one try; see `Translator`."""

    __slots__ = ("_stream", "asked", "unsupported")

    def __init__(self, *, drops: bool = False) -> None:
        """Sets whether parameters are dropped."""
        self.asked = Asked(stream_usage=True)
        self.unsupported = UnsupportedFields(ApiName.CHAT, drops=drops)
        self._stream = MessageStream()

    def request(self, fields: Fields) -> Fields:
        """Returns the chat request. Fields unknown to Messages pass through, since engines have their own.

        Raises:
            ArgumentInvalid: if the request is malformed, or cannot be expressed in chat completions.
        """
        if given(fields.get("thread", ABSENT)):
            raise ArgumentInvalid(_NO_THREADS, vendor_code="thread_unsupported_request")
        unsupported = self.unsupported
        translated: JSON = {}
        system = read(fields, "system", _SYSTEM, None)
        turns = read(fields, "messages", _TURNS, [])
        translated["messages"] = chat_messages(system, turns, unsupported)
        if turns and turns[-1].role == "assistant":
            # The model continues its own turn: vLLM's and SGLang's fields for it.
            translated |= {"continue_final_message": True, "add_generation_prompt": False}
        max_tokens = read(fields, "max_tokens", _COUNT, None)
        if max_tokens is not None:
            translated["max_completion_tokens"] = max_tokens
        stops = read(fields, "stop_sequences", _STOPS, None)
        if stops:
            translated["stop"] = stops
        metadata = read(fields, "metadata", _METADATA, None)
        if metadata is not None and metadata.user_id:
            translated["user"] = metadata.user_id
        if read(fields, "mcp_servers", _SERVERS, None):
            unsupported.param("mcp_servers", "mcp_servers (servers that Anthropic's service calls)")
        translated |= _tools(fields, turns, unsupported)
        translated |= _output(fields)
        unsupported.check()
        kept = {name: raw for name, raw in fields.items() if name not in _TRANSLATED | _DROPPED}
        return kept | {name: msgspec.Raw(encode(value)) for name, value in translated.items()}

    def whole(self, body: bytes) -> bytes:
        """Returns the first choice of the answer as a message.

        Raises:
            BackendUnavailable: if it is not a chat completion, or was aborted.
        """
        try:
            answer = _COMPLETION.decode(body)
        except UNREADABLE as error:
            raise BackendUnavailable("The backend's answer is not a chat completion.") from error
        if not answer.choices:
            raise BackendUnavailable("The backend's answer has no choice.")
        choice = answer.choices[0]
        if choice.finish_reason in ABORTED:
            raise BackendUnavailable("The backend aborted the answer.")
        content = _content(answer.id or "", choice)
        calls_tools = any(block["type"] == "tool_use" for block in content)
        refused = choice.message is not None and bool(choice.message.refusal)
        reason, sequence = stop_of(choice.finish_reason, choice.stop_reason, calls_tools=calls_tools)
        message: JSON = {
            "id": message_id(answer.id or ""),
            "type": "message",
            "role": "assistant",
            "model": answer.model or "",
            "content": content,
            "stop_reason": "refusal" if refused else reason,
            "stop_sequence": sequence,
            "usage": message_usage(answer.usage),
        }
        return encode(message)

    def event(self, event: bytes) -> list[bytes]:
        """Returns the Messages events for one event of the chat stream; see `MessageStream`."""
        return self._stream.event(event)

    def end(self) -> list[bytes]:
        """Returns the events that end the message; see `MessageStream`."""
        return self._stream.end()


def _tools(fields: Fields, turns: list[Turn], unsupported: UnsupportedFields) -> JSON:
    translated: JSON = {}
    given_tools = read(fields, "tools", _TOOLS, None) or ()
    # Anthropic's service, too, shows a deferred tool to the model only once it is referred to.
    known = referred_tools(turns) if any(tool.defer_loading for tool in given_tools) else set()
    tools = [
        _tool(f"tools[{index}]", tool, unsupported)
        for index, tool in enumerate(given_tools)
        if not tool.defer_loading or tool.name in known
    ]
    if kept := [tool for tool in tools if tool]:
        translated["tools"] = kept
    choice = read(fields, "tool_choice", _TOOL_CHOICE, None)
    if choice is None or (unsupported.drops and not kept):
        return translated  # servers reject a tool choice without tools
    if choice.disable_parallel_tool_use is not None:
        translated["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto" | "none":
            translated["tool_choice"] = choice.type
        case "any":
            translated["tool_choice"] = "required"
        case "tool" if choice.name:
            translated["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case _:
            unsupported.param("tool_choice", f"tool_choice (`{choice.type}`)")
    return translated


def _tool(place: str, tool: Tool, unsupported: UnsupportedFields) -> JSON:
    if tool.type not in (None, "custom"):
        unsupported.param("tools", f"{place} (`{tool.type}`, a tool of Anthropic's own)")
        return {}
    function: JSON = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if given(tool.input_schema):
        function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _output(fields: Fields) -> JSON:
    translated: JSON = {}
    config = read(fields, "output_config", _OUTPUT_CONFIG, None) or OutputConfig()
    thinking = read(fields, "thinking", _THINKING, None)
    effort = config.effort or (thinking and effort_of(thinking.budget_tokens))
    if effort:
        translated["reasoning_effort"] = effort
    wanted = config.format or read(fields, "output_format", _OUTPUT_FORMAT, None)
    if wanted is not None and given(wanted.schema):
        schema = {"name": "answer", "schema": wanted.schema, "strict": True}
        translated["response_format"] = {"type": "json_schema", "json_schema": schema}
    return translated


def _content(answer_id: str, choice: Choice) -> list[JSON]:
    message = choice.message
    if message is None:
        return []
    blocks: list[JSON] = []
    for field, thinking in (("reasoning_content", message.reasoning_content), ("reasoning", message.reasoning)):
        if thinking and not blocks:
            blocks.append({"type": "thinking", "thinking": thinking, "signature": field})
    texts = [message.content] if isinstance(message.content, str) else [p.text for p in message.content or ()]
    text = "".join(text for text in [*texts, message.refusal] if text)
    if text:
        blocks.append({"type": "text", "text": text})
    for index, call in enumerate(message.tool_calls or ()):
        if call.function is not None:
            use = {
                "type": "tool_use",
                "id": call.id or made_tool_id(answer_id, index),
                "name": call.function.name or "",
            }
            blocks.append({**use, "input": _input(call.function.arguments or "")})
    return blocks


def _input(arguments: str) -> msgspec.Raw:
    """Returns a tool call's arguments as an object; malformed arguments are kept as text."""
    if not arguments.strip():
        return msgspec.Raw(b"{}")
    try:
        _OBJECT.decode(arguments)
    except (*UNREADABLE, UnicodeEncodeError):
        return msgspec.Raw(encode({INVALID_JSON: arguments}))
    return msgspec.Raw(arguments.encode())
