"""Equivalents between chat completions and Messages: ids, stop reasons, usage.

Both directions are side by side, so that one is the inverse of the other.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

JSON = dict[str, Any]  # Any: documents of another API, of any depth

_CHAT_ID, _MESSAGE_ID = "chatcmpl-", "msg_"
_TOOL_ID = re.compile(r"[^a-zA-Z0-9_-]")
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
ABORTED = frozenset({"abort", "error"})
"""Engines' finish reasons of aborted answers."""

INVALID_JSON = "INVALID_JSON"
"""Only key of a tool's input whose text is not a JSON object, as the vendor recommends."""

EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
"""Reasoning efforts of chat completions, mapped to those of Messages."""


_BUDGETS = ((10_000, "high"), (5_000, "medium"), (0, "low"))


def effort_of(budget_tokens: int | None) -> str | None:
    """Returns the reasoning effort for a budget of thinking tokens, as LiteLLM maps it; None without a budget.

    Only the three efforts that every server of chat completions knows.
    """
    if budget_tokens is None:
        return None
    return next((effort for least, effort in _BUDGETS if budget_tokens >= least), "low")


def message_id(chat_id: str) -> str:
    """Returns the id of a message translated from a chat completion; the two can be matched in logs."""
    return _MESSAGE_ID + chat_id.removeprefix(_CHAT_ID)


def chat_id(message: str) -> str:
    """Returns the id of a chat completion translated from a message."""
    return _CHAT_ID + message.removeprefix(_MESSAGE_ID)


def tool_use_id(call_id: str) -> str:
    """Returns a tool call's id in the characters that Messages allows."""
    return _TOOL_ID.sub("_", call_id) or "_"


def made_tool_id(answer_id: str, index: int) -> str:
    """Returns an id for a tool call without one."""
    return f"toolu_{_TOOL_ID.sub('_', answer_id.removeprefix(_CHAT_ID))}_{index}"


def stop_of(finish_reason: str | None, matched: object, *, calls_tools: bool) -> tuple[str, str | None]:
    """Returns the stop reason and stop sequence for a finish reason.

    Args:
        matched: stop reported by engines such as vLLM: the stop sequence, a token id, or nothing.
        calls_tools: whether the answer has tool calls; engines report `stop` if the caller forced the tool.
    """
    reason = _STOP_REASONS.get(finish_reason or "stop", "end_turn")
    if reason == "end_turn" and calls_tools:
        return "tool_use", None
    if reason == "end_turn" and isinstance(matched, str):
        return "stop_sequence", matched
    return reason, None


def finish_of(stop_reason: str | None) -> str:
    """Returns the finish reason for a stop reason."""
    return _FINISH_REASONS.get(stop_reason or "end_turn", "stop")


class ChatDetails(msgspec.Struct):
    """Details of a chat completion's token counts."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    """Usage of a chat completion, whose prompt tokens include cached ones."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: ChatDetails | None = None
    completion_tokens_details: ChatDetails | None = None


class OutputDetails(msgspec.Struct):
    """Details of a message's output tokens."""

    thinking_tokens: int | None = None


class MessageUsage(msgspec.Struct):
    """Usage of a message, whose input tokens exclude cached ones."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens_details: OutputDetails | None = None


def message_usage(usage: ChatUsage | None) -> JSON:
    """Returns the usage in the format of Messages; zeros if the backend reported none."""
    usage = usage or ChatUsage()
    details = usage.prompt_tokens_details or ChatDetails()
    read, written = details.cached_tokens or 0, details.cache_write_tokens or 0
    translated: JSON = {
        "input_tokens": max(0, usage.prompt_tokens - read - written),
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
    }
    reasoning = usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
    if reasoning:
        translated["output_tokens_details"] = {"thinking_tokens": reasoning}
    return translated


def chat_usage(usage: MessageUsage) -> JSON:
    """Returns the usage in the format of chat completions."""
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    prompt, completion = (usage.input_tokens or 0) + read + written, usage.output_tokens or 0
    translated: JSON = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if read or written:
        translated["prompt_tokens_details"] = {"cached_tokens": read, "cache_write_tokens": written}
    if usage.output_tokens_details and usage.output_tokens_details.thinking_tokens:
        translated["completion_tokens_details"] = {"reasoning_tokens": usage.output_tokens_details.thinking_tokens}
    return translated
