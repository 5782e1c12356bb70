"""Hashes by which the store finds the call that another one continues.

A hash covers role, text and tool calls of every message. What clients leave out or make anew when they send an answer
back is not part of it: ids, reasoning, empty fields, and the spaces of a tool's arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_PREFIXES: Final = 32

Message = Mapping[str, Any]


def chain(messages: Sequence[Message], answer: Message | None) -> tuple[bytes, list[bytes]]:
    """Returns the hash over messages and answer, and those over beginnings that end with an answer, longest first.

    The first is empty without an answer.
    """
    digest, prefixes = b"", []
    for message in messages:
        digest = _next(digest, message)
        if message.get("role") == "assistant":
            prefixes.append(digest)
    return b"" if answer is None else _next(digest, answer), prefixes[: -MAX_PREFIXES - 1 : -1]


def _next(before: bytes, message: Message) -> bytes:
    said = [message.get("role"), message.get("content") or "", [_call(each) for each in _objects(message)]]
    return hashlib.sha256(before + json.dumps(said, sort_keys=True).encode()).digest()


def _objects(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []


def _call(call: Message) -> list[Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return [call.get("type")]
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return [function.get("name"), arguments]
