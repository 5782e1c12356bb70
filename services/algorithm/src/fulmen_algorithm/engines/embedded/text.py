"""Incremental text of a completion: detokenised, ended at stop strings, held back while ambiguous.

Tool calls have this form, which a chat template can reproduce exactly:

    <tool_call>{"name":"NAME","arguments":{...}}</tool_call>

Invariant: emitted text is final; a possible beginning of a stop string or of a tool call is held back until it is
decided. The arguments of a parsed call are exactly the sampled characters.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[A-Za-z0-9_.-]+)"\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(r"\s*\}\s*" + re.escape(TOOL_CALL_CLOSE) + r"\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function call of the model.

    Attributes:
        name: Function name.
        arguments: JSON object as text, exactly as sampled.
    """

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Splits an answer into its text and the tool calls at its end.

    If tool calls are malformed or followed by other text, the whole answer is text, so that none of it is lost.

    Returns:
        The text before the first call, and the calls.
    """
    start = text.find(TOOL_CALL_OPEN)
    if start < 0:
        return text, []
    calls: list[ToolCall] = []
    position = start
    while position < len(text):
        parsed = _parse_one(text, position)
        if parsed is None:
            return text, []
        call, position = parsed
        calls.append(call)
    return text[:start], calls


def _parse_one(text: str, position: int) -> tuple[ToolCall, int] | None:
    if not text.startswith(TOOL_CALL_OPEN, position):
        return None
    head = _HEAD.match(text, position + len(TOOL_CALL_OPEN))
    if head is None:
        return None
    try:
        arguments, end = json.JSONDecoder().raw_decode(text, head.end())
    except json.JSONDecodeError:
        return None
    tail = _TAIL.match(text, end)
    if tail is None or not isinstance(arguments, dict):
        return None
    return ToolCall(name=head["name"], arguments=text[head.end() : end]), tail.end()


class TextStream:
    """Detokenises one completion token by token."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str], expect_tool_calls: bool) -> None:
        """Initializes the stream.

        Args:
            tokenizer: Backend tokenizer; special tokens are left out of the text.
            stop: Texts that end the completion.
            expect_tool_calls: Whether text from `<tool_call>` on is held back until the end.
        """
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held_back = (*self._stop, TOOL_CALL_OPEN) if expect_tool_calls else self._stop
        self._expect_tool_calls = expect_tool_calls
        self._emitted = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Adds a token; true if the text contains a stop string, before which it then ends."""
        piece = self._decoder.step(self._tokenizer, token_id)
        if piece is None or self.stopped:
            return self.stopped
        searched_from = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += piece
        hits = [at for s in self._stop if (at := self.text.find(s, searched_from)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self.stopped = True
        return self.stopped

    def drain(self, *, final: bool = False) -> str:
        """Returns the text that became final since the last call.

        Args:
            final: Whether the last token was added; all text is then final but tool calls, see `parse_tool_calls`.
        """
        end = self._certain_end(final)
        piece = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _certain_end(self, final: bool) -> int:
        if self._expect_tool_calls and TOOL_CALL_OPEN in self.text:
            if not final:
                return self.text.index(TOOL_CALL_OPEN)
            return len(parse_tool_calls(self.text)[0])
        if final:
            return len(self.text)
        end = len(self.text)
        for marker in self._held_back:
            for length in range(min(len(marker) - 1, len(self.text)), 0, -1):
                if self.text.endswith(marker[:length]):
                    end = min(end, len(self.text) - length)
                    break
        return end
