"""The texts of a model call as OpenAI chat messages, for any API.

Invariant: nothing is invented: fields missing in a document stay absent, and a document of an unknown format has no
messages. Texts, tool calls, their results and images are kept in order; other blocks are unchanged.

Sources: https://docs.anthropic.com/en/api/messages, https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulmen.model_call import ModelCall, ModelCallInvalid

Message = Mapping[str, Any]
Messages = tuple[Message, ...]

_BLOCK_KINDS = frozenset({"tool_use", "tool_result", "thinking", "image"})
"""Kinds of content blocks of Anthropic's Messages API that the chat API writes differently."""
_GRAMMARS = ("structured_outputs", "guided_")
"""What vLLM's and SGLang's own request fields for grammars begin with."""


def request_messages(call: ModelCall) -> Messages:
    """Returns the request as chat messages.

    Raises:
        ModelCallInvalid: If the request is not JSON.
    """
    return messages_of(_decoded(call.request_json))


def messages_of(request: Message) -> Messages:
    """Returns the messages of a decoded request of any API as chat messages."""
    if "messages" in request:
        turns = (each for turn in _objects(request["messages"]) for each in _chat_messages(turn))
        return (*_system(request.get("system")), *turns)
    if "input" in request:
        return (*_system(request.get("instructions")), *_input(request["input"]))
    prompt = request.get("prompt")
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else ()


def answer_message(call: ModelCall) -> Message | None:
    """Returns the call's choice of the answer as a chat message, or None.

    Raises:
        ModelCallInvalid: If the answer is not JSON.
    """
    return answer_of(_decoded(call.response_json), choice=call.choice)


def answer_of(answer: Message, *, choice: int = 0) -> Message | None:
    """Returns a choice of a decoded answer of any API as a chat message, or None."""
    choices = _objects(answer.get("choices"))
    if choices:
        found = next((each for each in choices if each.get("index") == choice), None)
        if found is None:
            found = choices[0] if len(choices) == 1 else {}
        message, text = found.get("message"), found.get("text")
        if isinstance(message, dict):
            return message
        return {"role": "assistant", "content": text} if isinstance(text, str) else None
    if answer.get("type") == "message" and isinstance(answer.get("content"), list):
        return _answer_of_blocks(answer["content"])
    if isinstance(answer.get("output"), list):
        return _output_message(_objects(answer["output"]))
    return None


def offered_tools(call: ModelCall) -> Messages:
    """Returns the tools offered to the model, in the format of the chat API.

    Raises:
        ModelCallInvalid: If the request is not JSON.
    """
    return tools_of(_decoded(call.request_json))


def tools_of(request: Message) -> Messages:
    """Returns the tools of a decoded request of any API, in the format of the chat API."""
    return tuple(map(_chat_tool, _objects(request.get("tools"))))


def is_constrained(call: ModelCall) -> bool:
    """Returns whether the request restricted what could be sampled: to a format, a grammar, or a call of a tool.

    Raises:
        ModelCallInvalid: If the request is not JSON.
    """
    # Most requests are not, and some are long.
    if not any(f'"{name}'.encode() in call.request_json for name in ("response_format", "tool_choice", *_GRAMMARS)):
        return False
    request = _decoded(call.request_json)
    form, choice = request.get("response_format"), request.get("tool_choice")
    formatted = isinstance(form, dict) and form.get("type") not in (None, "text")
    grammar = any(value and name.startswith(_GRAMMARS) for name, value in request.items())
    return formatted or grammar or choice == "required" or isinstance(choice, dict)


def same_answer(answer: Message, repeated: Message) -> bool:
    """Returns whether a message of a request repeats an answer; absent, null and empty fields are the same."""
    return repeated.get("role") == "assistant" and all(
        (answer.get(key) or None) == (repeated.get(key) or None) for key in ("content", "tool_calls")
    )


def has_reasoning(message: Message) -> bool:
    """Returns whether a message carries the model's reasoning."""
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _system(text: object) -> Messages:
    return ({"role": "system", "content": text},) if text else ()


def _input(value: object) -> Messages:
    """Converts the input of the Responses API to messages; other items are unchanged."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    return tuple(_item_message(item) for item in _objects(value))


def _item_message(item: Message) -> Message:
    match item.get("type"):
        case "function_call":
            return {"role": "assistant", "content": None, "tool_calls": [_tool_call(item)]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id", ""), "content": item.get("output")}
        case _:
            return {key: value for key, value in item.items() if key in ("role", "content")} or item


def _output_message(items: Messages) -> Message:
    texts = [
        part["text"]
        for item in items
        if item.get("type") == "message"
        for part in _objects(item.get("content"))
        if isinstance(part.get("text"), str)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if calls := [_tool_call(item) for item in items if item.get("type") == "function_call"]:
        message["tool_calls"] = calls
    return message


def _tool_call(item: Message) -> dict[str, Any]:
    function = {"name": item.get("name", ""), "arguments": item.get("arguments", "")}
    return {"id": item.get("call_id", ""), "type": "function", "function": function}


def _chat_messages(turn: Message) -> Iterator[Message]:
    """Yields a turn as chat messages: tool results as separate messages, then the rest."""
    content = turn.get("content")
    blocks = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    if not any(isinstance(kind := each.get("type"), str) and kind in _BLOCK_KINDS for each in blocks):
        yield turn
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id", ""),
                "content": _parts(block.get("content")),
            }
    rest = [each for each in blocks if each.get("type") not in ("tool_result", "tool_use", "thinking")]
    calls = [_block_call(each) for each in blocks if each.get("type") == "tool_use"]
    thoughts = [str(each.get("thinking", "")) for each in blocks if each.get("type") == "thinking"]
    if not (rest or calls or thoughts):
        return
    message: dict[str, Any] = {"role": turn.get("role", ""), "content": _parts(rest) if rest else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _answer_of_blocks(content: Sequence[Any]) -> Message:
    """Returns the answer with these blocks as one chat message."""
    turn = {"role": "assistant", "content": list(content)}
    message = next(iter(_chat_messages(turn)), turn)
    return {**message, "content": _parts(message.get("content"))}


def _chat_tool(tool: Message) -> Message:
    """Returns the definition of a tool in the format of the chat API."""
    if "input_schema" in tool:
        function = {key: tool[key] for key in ("name", "description") if key in tool}
        return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
    if tool.get("type") == "function" and "function" not in tool and "name" in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _parts(content: object) -> object:
    """Returns content as chat parts; content with text only as one text."""
    if not isinstance(content, list):
        return content
    if all(isinstance(each, dict) and each.get("type") == "text" for each in content):
        return "".join(str(each.get("text", "")) for each in content)
    return [_part(each) if isinstance(each, dict) else each for each in content]


def _part(block: Message) -> Message:
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, dict):
        return block
    url = source.get("url") or f"data:{source.get('media_type', '')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _block_call(block: Message) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    return {
        "id": block.get("id", ""),
        "type": "function",
        "function": {"name": block.get("name", ""), "arguments": arguments},
    }


def _decoded(document: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(document) if document else {}
    except (ValueError, RecursionError) as error:
        raise ModelCallInvalid("A recorded request or answer is not JSON, or nested too deeply.") from error
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> Messages:
    return tuple(item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()
