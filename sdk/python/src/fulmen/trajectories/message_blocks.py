"""Converts turns of Anthropic's Messages API, and tools of any API, to the format of OpenAI's chat API.

Invariant: texts, tool calls, their results and images are kept in order; other blocks are unchanged.

Sources: https://docs.anthropic.com/en/api/messages, https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def chat_messages(turn: Message) -> Iterator[Message]:
    """Yields a turn as chat messages: tool results as separate messages, then the rest."""
    content = turn.get("content")
    blocks = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    if not any(each.get("type") in _OWN_KINDS for each in blocks):
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
    calls = [_tool_call(each) for each in blocks if each.get("type") == "tool_use"]
    thoughts = [str(each.get("thinking", "")) for each in blocks if each.get("type") == "thinking"]
    if not (rest or calls or thoughts):
        return
    message: dict[str, Any] = {"role": turn.get("role", ""), "content": _parts(rest) if rest else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def answer_of_blocks(content: Sequence[Any]) -> Message:
    """Returns the answer with these blocks as one chat message."""
    turn = {"role": "assistant", "content": list(content)}
    message = next(iter(chat_messages(turn)), turn)
    return {**message, "content": _parts(message.get("content"))}


def chat_tool(tool: Message) -> Message:
    """Returns the definition of a tool in the format of the chat API."""
    if "input_schema" in tool:
        function = {key: tool[key] for key in ("name", "description") if key in tool}
        return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
    if tool.get("type") == "function" and "function" not in tool and "name" in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


_OWN_KINDS = frozenset({"tool_use", "tool_result", "thinking", "image"})


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


def _tool_call(block: Message) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    return {
        "id": block.get("id", ""),
        "type": "function",
        "function": {"name": block.get("name", ""), "arguments": arguments},
    }
