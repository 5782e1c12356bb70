"""The contents of a model call: messages that are new in its conversation, tool calls and the answer, as lines for a
terminal.

Invariant: a line holds printable characters only, whatever an agent or a model has written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fulmen.model_call import ModelCall, ModelCallInvalid
from fulmen.trajectories.chat import Message, answer_message, request_messages
from fulmen_cli.printable import printable

__all__ = ["MAX_MESSAGE_CHARS", "Conversations"]

MAX_MESSAGE_CHARS: Final = 1000


class Conversations:
    """The conversations of an attempt, and what each call adds to them."""

    def __init__(self, *, max_chars: int | None = MAX_MESSAGE_CHARS) -> None:
        """Creates it without a conversation; longer messages are cut to `max_chars`, none if that is None."""
        self._max_chars = max_chars
        # Digests of conversations up to some message.
        self._told: set[bytes] = set()

    def lines(self, call: ModelCall) -> list[str]:
        """Returns the messages that no earlier call has shown, and the answer."""
        try:
            messages = request_messages(call)
            answer = answer_message(call)
        except ModelCallInvalid as error:
            return [f"its texts cannot be read: {error}"]
        said = b""
        known, digests = 0, []
        for number, message in enumerate(messages, 1):
            said = _digest(said, message)
            digests.append(said)
            if said in self._told:
                known = number
        self._told.update(digests)
        lines = [f"({known} earlier message{'s' if known > 1 else ''})"] if known else []
        new = [*messages[known:], *([answer] if answer is not None else [])]
        if answer is not None:
            self._told.add(_digest(said, answer))
        for message in new:
            for label, text in _parts(message):
                lines += _indented(printable(label), _cut(printable(text), self._max_chars))
        return lines


def _digest(before: bytes, message: Message) -> bytes:
    """Returns the digest of a conversation with one more message; null, absent and empty fields are the same."""
    kept = {key: message[key] for key in ("role", "content", "tool_calls", "tool_call_id") if message.get(key)}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(before + text.encode()).digest()


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yields label and text of each part of a message."""
    role = str(message.get("role") or message.get("type") or "message")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        yield f"{role} thinks", _text(thought)
    calls = message.get("tool_calls")
    text = _text(message.get("content"))
    if text or not (thought or calls):
        yield role, text
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        yield f"{role} calls", f"{function.get('name', '?')}({_text(function.get('arguments', ''))})"


def _text(content: Any) -> str:
    """Returns content as text; of images and other parts only what they are."""
    match content:
        case None:
            return ""
        case str():
            return content
        case [*parts]:
            return "\n".join(filter(None, map(_text, parts)))
        case {"text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
        case Mapping():
            return json.dumps(content, ensure_ascii=False)
        case _:
            return str(content)


def _cut(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}… ({len(text) - max_chars:,} more characters: --full)"


def _indented(label: str, text: str) -> list[str]:
    first, *rest = text.split("\n")
    return [f"{' '.join(label.split())}: {first}", *(f"  {line}" for line in rest)]
