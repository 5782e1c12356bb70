"""Translates a chat stream to the events of a Messages stream.

Invariant: content blocks never overlap: one is open at a time, and blocks are started, filled and stopped in the order
of their indices. No piece of the answer is lost: pieces of a later block wait until the open one is complete. Every
stream ends with a stop reason and `message_stop`, or with an error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import UNREADABLE, ApiName, Dialect, encode, given
from fulmen_llm_proxy.apis.errors import error_event, error_in_stream
from fulmen_llm_proxy.apis.sse import DONE, encode_event, event_data
from fulmen_llm_proxy.translation.chat_shapes import ChatMessage, Choice, Completion, Function, ToolCall
from fulmen_llm_proxy.translation.equivalents import (
    ABORTED,
    JSON,
    ChatUsage,
    made_tool_id,
    message_id,
    message_usage,
    stop_of,
)

PING = encode_event(b'{"type":"ping"}', b"ping")

_CHUNK = msgspec.json.Decoder(Completion)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True, kw_only=True)
class _Segment:
    """A content block, and its pieces not yet sent.

    Attributes:
        kind: "thinking", "text" or "tool_use".
        call: the backend's index of the tool call.
        label: for thinking, the field in which it arrived.
        sent: pieces sent to the caller; kept for tools only.
    """

    kind: str
    call: int = -1
    label: str = ""
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    opened: bool = False

    def is_whole(self) -> bool:
        """Returns whether the block is complete once another one has started.

        A tool call is complete when its arguments are: some backends interleave parallel calls.
        """
        if self.kind != "tool_use":
            return True
        text = "".join([*self.sent, *self.pieces]).strip()
        if not text.endswith("}"):
            return False
        try:
            _OBJECT.decode(text)
        except (*UNREADABLE, UnicodeEncodeError):
            return False
        return True


class MessageStream:
    """Translates the chunks of one stream."""

    __slots__ = (
        "_answer_id",
        "_choice",
        "_closed",
        "_done",
        "_index",
        "_last_call",
        "_over",
        "_refused",
        "_segments",
        "_started",
        "_tools",
        "_usage",
    )

    def __init__(self) -> None:
        self._answer_id = ""
        self._started = False
        self._over = False
        self._refused = False
        self._index = 0
        self._tools = 0
        self._last_call = -1
        self._closed: set[int] = set()
        self._done = False
        self._segments: deque[_Segment] = deque()
        self._choice: Choice | None = None
        self._usage: ChatUsage | None = None

    def event(self, event: bytes) -> list[bytes]:
        """Returns the caller's events for an event of the backend.

        Raises:
            BackendUnavailable: if it is not an event of a chat stream, or reports an aborted answer.
        """
        if self._over:
            return []
        data = event_data(event)
        if data is None:
            return [PING]
        if data == DONE:
            self._done = self._started
            return self.end()
        try:
            chunk = _CHUNK.decode(data)
        except UNREADABLE as error:
            raise BackendUnavailable("The backend sent an event that does not belong to a chat completion.") from error
        if given(chunk.error) or (chunk.choices is None and chunk.usage is None):
            self._over = True
            return [error_event(error_in_stream(data), ApiName.MESSAGES, Dialect.ANTHROPIC)]
        out: list[bytes] = []
        if chunk.usage is not None:
            self._usage = chunk.usage
        if not self._started and chunk.choices:  # Azure sends the result of its prompt filter before, without an id
            out.append(self._start(chunk))
        for choice in chunk.choices or ():
            if choice.index == 0:
                self._take(choice, out)
        return out

    def end(self) -> list[bytes]:
        """Returns the events that end the message; none if it has ended.

        Raises:
            BackendUnavailable: if the backend's stream ended before its answer did.
        """
        if self._over:
            return []
        self._over = True
        choice = self._choice
        if choice is None and not self._done:
            raise BackendUnavailable("The backend's stream ended before its answer did.")
        finish, matched = (None, None) if choice is None else (choice.finish_reason, choice.stop_reason)
        reason, sequence = stop_of(finish, matched, calls_tools=self._tools > 0)
        delta = {"stop_reason": "refusal" if self._refused else reason, "stop_sequence": sequence}
        out: list[bytes] = []
        self._advance(out, final=True)
        out.append(_event("message_delta", delta=delta, usage=message_usage(self._usage)))
        out.append(_event("message_stop"))
        return out

    def _start(self, chunk: Completion) -> bytes:
        self._started = True
        self._answer_id = chunk.id or ""
        usage = message_usage(chunk.usage)
        message: JSON = {
            "id": message_id(self._answer_id),
            "type": "message",
            "role": "assistant",
            "model": chunk.model or "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message)

    def _take(self, choice: Choice, out: list[bytes]) -> None:
        if choice.delta is not None:
            self._add(choice.delta)
        if choice.finish_reason in ABORTED:
            raise BackendUnavailable("The backend aborted the answer.")
        if choice.finish_reason:
            self._choice = choice
        self._advance(out, final=bool(choice.finish_reason))

    def _add(self, delta: ChatMessage) -> None:
        if delta.reasoning_content:
            self._add_text("thinking", delta.reasoning_content, "reasoning_content")
        elif delta.reasoning:
            self._add_text("thinking", delta.reasoning, "reasoning")
        content = delta.content
        if content:
            self._add_text("text", content if isinstance(content, str) else "".join(p.text or "" for p in content))
        if delta.refusal:
            self._refused = True
            self._add_text("text", delta.refusal)
        for call in delta.tool_calls or ():
            self._add_call(call)

    def _add_text(self, kind: str, text: str, label: str = "") -> None:
        if not self._segments or self._segments[-1].kind != kind:
            self._segments.append(_Segment(kind=kind, label=label))
        self._segments[-1].pieces.append(text)

    def _add_call(self, call: ToolCall) -> None:
        function = call.function or Function()
        segment = self._segment_of(call, function)
        if segment is None:
            return
        if not segment.opened:
            segment.id = segment.id or call.id or ""
            segment.name = segment.name or function.name or ""
        if function.arguments:
            segment.pieces.append(function.arguments)

    def _segment_of(self, call: ToolCall, function: Function) -> _Segment | None:
        """Returns the block of a tool call, a new one if the call starts here; None for data after a complete call.

        Some backends give parallel calls the same index, or none; a new id then starts a new call.
        """
        last = self._last_call if call.index is None else call.index
        segment = next((known for known in reversed(self._segments) if known.call == last), None)
        begins = bool(call.id) and (segment is None or (bool(segment.id) and call.id != segment.id))
        if not begins and (segment is not None or (last in self._closed and not function.name)):
            return segment
        segment = _Segment(kind="tool_use", call=self._tools if call.index is None else call.index)
        self._tools += 1
        self._last_call = segment.call
        self._segments.append(segment)
        return segment

    def _advance(self, out: list[bytes], *, final: bool) -> None:
        """Emits what can be sent: the open block, and the next ones once it is complete."""
        segments = self._segments
        while segments:
            segment = segments[0]
            if not self._emit(segment, out, final=final):
                return
            if not (final or (len(segments) > 1 and segment.is_whole())):
                return
            out.append(_event("content_block_stop", index=self._index))
            self._index += 1
            self._closed.add(segments.popleft().call)

    def _emit(self, segment: _Segment, out: list[bytes], *, final: bool) -> bool:
        """Emits the pieces of a block; returns False if it cannot start yet."""
        if not segment.opened:
            if segment.kind == "tool_use":
                if not segment.name and not final:
                    return False
                segment.id = segment.id or made_tool_id(self._answer_id, self._index)
            out.append(_event("content_block_start", index=self._index, content_block=_empty(segment)))
            segment.opened = True
        deltas = [_delta(segment.kind, piece) for piece in segment.pieces]
        out += [_event("content_block_delta", index=self._index, delta=delta) for delta in deltas]
        if segment.kind == "tool_use":
            segment.sent += segment.pieces
        elif segment.kind == "thinking" and (final or len(self._segments) > 1):
            signature = {"type": "signature_delta", "signature": segment.label}
            out.append(_event("content_block_delta", index=self._index, delta=signature))
        segment.pieces = []
        return True


def _empty(segment: _Segment) -> JSON:
    match segment.kind:
        case "tool_use":
            return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": {}}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case _:
            return {"type": "text", "text": ""}


def _delta(kind: str, piece: str) -> JSON:
    match kind:
        case "tool_use":
            return {"type": "input_json_delta", "partial_json": piece}
        case "thinking":
            return {"type": "thinking_delta", "thinking": piece}
        case _:
            return {"type": "text_delta", "text": piece}


def _event(kind: str, **fields: object) -> bytes:
    return encode_event(encode({"type": kind, **fields}), kind.encode())
