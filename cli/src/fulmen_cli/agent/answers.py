"""Parses answers of model APIs: tokens, text and errors of OpenAI's and Anthropic's shapes, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Usage", "answer_of", "error_of", "text_of", "tool_names_of", "usage_of"]

MAX_ERROR: Final = 500
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a call; None if the answer lacks them."""

    prompt: int | None = None
    completion: int | None = None


def answer_of(content: bytes, content_type: str) -> dict[str, Any]:
    """Returns the answer's JSON; of a stream, a document with the text, usage and tools that its events hold."""
    if not content_type.startswith("text/event-stream"):
        return _object(content)
    found: dict[str, Any] = {"text": "", "usage": {}, "tools": []}
    for line in content.splitlines():
        if line.startswith(b"data:"):
            _add(found, _object(line.removeprefix(b"data:").strip()))
    return found


def usage_of(answer: Json) -> Usage:
    """Returns the tokens that an answer counts."""
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Usage(
        prompt=_count(usage, "prompt_tokens", "input_tokens"),
        completion=_count(usage, "completion_tokens", "output_tokens"),
    )


def text_of(answer: Json) -> str:
    """Returns the text of an answer; empty if it has none."""
    match answer:
        case {"text": str(text)}:
            return text
        case {"choices": [{"message": {"content": str(text)}}, *_]} | {"choices": [{"text": str(text)}, *_]}:
            return text
        case {"content": [*blocks]}:
            return "".join(block.get("text", "") for block in blocks if isinstance(block, dict))
        case {"output": [*items]}:
            parts = [part for item in items if isinstance(item, dict) for part in item.get("content") or ()]
            return "".join(part.get("text", "") for part in parts if isinstance(part, dict))
        case _:
            return ""


def tool_names_of(answer: Json) -> list[str]:
    """Returns the names of the tools that an answer calls."""
    match answer:
        case {"tools": [*names]}:
            return [str(name) for name in names]
        case {"choices": [{"message": {"tool_calls": [*calls]}}, *_]}:
            return [str(call.get("function", {}).get("name", "?")) for call in calls if isinstance(call, dict)]
        case {"content": [*items]} | {"output": [*items]}:
            uses = ("tool_use", "function_call")
            return [str(each.get("name")) for each in items if isinstance(each, dict) and each.get("type") in uses]
        case _:
            return []


def error_of(answer: Json, content: bytes) -> str:
    """Returns the message of an error answer."""
    match answer:
        case {"error": {"message": str(message)}} | {"error": str(message)} | {"message": str(message)}:
            return message[:MAX_ERROR]
        case _:
            return content[:MAX_ERROR].decode(errors="replace")


def _add(found: dict[str, Any], event: Json) -> None:
    match event:
        case {"choices": [{"delta": {"content": str(text)}}, *_]} | {
            "delta": {"type": "text_delta", "text": str(text)}
        }:
            found["text"] += text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            found["text"] += text
        case {"choices": [{"delta": {"tool_calls": [*calls]}}, *_]}:
            names = [call["function"]["name"] for call in calls if call.get("function", {}).get("name")]
            found["tools"] += names
        case {"content_block": {"type": "tool_use", "name": str(name)}}:
            found["tools"].append(name)
        case _:
            pass
    for holder in (event, event.get("message"), event.get("response")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            found["usage"] |= holder["usage"]


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _count(usage: Json, *names: str) -> int | None:
    for name in names:
        if isinstance(usage.get(name), int):
            return int(usage[name])
    return None
